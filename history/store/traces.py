"""Recorded responses of each prompt and step, as jsonl files that benchmarks replay.

Each line holds one response as token ids; reading needs no tokenizer. Files are append-only, one per step, so that a
crash loses at most the line being written. `read_traces` refuses a torn line with file and line number, unless the line
is the last of its file.
"""

import json
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from history.own_files import opener


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded response."""

    step: int
    prompt_id: str
    sample: int
    """Index of the response within its group."""
    prompt_ids: npt.NDArray[np.int32]
    """[P]"""
    response_ids: npt.NDArray[np.int32]
    """[T]"""
    reward: float
    """NaN for a response without one, because its scoring failed; `null` in the file."""


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Append `traces` to `path`."""
    with open(path, "a", encoding="utf-8", opener=opener) as file:
        for trace in traces:
            row = {
                "step": trace.step,
                "prompt_id": trace.prompt_id,
                "sample": trace.sample,
                "reward": None if math.isnan(trace.reward) else trace.reward,
                "prompt_ids": trace.prompt_ids.tolist(),
                "response_ids": trace.response_ids.tolist(),
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def read_traces(path: Path, *, only: Container[int] | None = None) -> Iterator[Trace]:
    """Yield the traces of one file in order; `only` those on these lines, counted from 1.

    Raises:
        ValueError: a line is no trace, and is not an unfinished last line; names file and line.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            if only is not None and number not in only:
                continue
            try:
                row = json.loads(line)
                yield Trace(
                    step=int(row["step"]),
                    prompt_id=str(row["prompt_id"]),
                    sample=int(row["sample"]),
                    prompt_ids=np.asarray(row["prompt_ids"], dtype=np.int32),
                    response_ids=np.asarray(row["response_ids"], dtype=np.int32),
                    reward=math.nan if row["reward"] is None else float(row["reward"]),
                )
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a trace ({error!r})") from error
