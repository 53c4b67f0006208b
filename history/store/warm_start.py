"""Reads the history of another run to start from: a snapshot's folder, or recorded traces.

Traces name no tokenizer. The prompts that both runs share reveal it: their token ids must be equal.

Traces of a run do not fit into memory. Files are read from the newest back, until the budget is full, and each twice:
first for the steps and sizes of its visits, then for the chosen responses, which leave in batches.

Invariant: responses of another run have steps below 0, in their old order, so that all responses of this run are newer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from history.store.prompt_store import RESPONSE_BYTES
from history.store.response_batch import ResponseBatch
from history.store.snapshot import MANIFEST
from history.store.traces import read_traces
from history.types import PastResponse, TokenIds, prompt_key

_TOKENS_PER_BATCH = 1 << 21

_ENOUGH_PROMPTS = 64
"""Shared prompts that reveal another tokenizer before all files are read."""


def is_snapshot(path: Path) -> bool:
    """Check whether `path` is a snapshot's folder and not traces."""
    return (path / MANIFEST).exists()


def trace_files(path: Path) -> list[Path]:
    """Return the jsonl files at `path`, in order of their steps."""
    files = sorted(path.glob("*.jsonl"), key=lambda file: (len(file.name), file.name)) if path.is_dir() else [path]
    return [file for file in files if file.exists()]


def warm_start_problems(path: Path) -> list[str]:
    """Return the faults of a warm start's path that show without reading the files."""
    if is_snapshot(path) or trace_files(path):
        return []
    return [
        f"`history.warm_start` = {path}: neither a folder with a {MANIFEST} (`checkpoints/STEP/history` of a run), nor "
        "a jsonl file of traces, nor a folder of such files"
    ]


@dataclass(slots=True, kw_only=True)
class _Visit:
    """The responses of one prompt and step in one file."""

    step: int
    lines: list[int] = field(default_factory=list)
    """Their lines in the file, from 1."""
    num_bytes: int = 0
    """As the history counts them."""


def read_warm_start(
    path: Path, prompts: Mapping[str, TokenIds], *, budget_bytes: int, say: Callable[[str], None]
) -> Iterator[ResponseBatch]:
    """Yield the last visit of each prompt of this run, the newest files first, until the budget is full.

    A prompt's last visit is that of the newest step in the newest file that holds the prompt.

    Args:
        path: a file or folder of traces.
        prompts: token ids of this run's prompts, by prompt id.
        budget_bytes: most bytes of the responses, as the history counts them.
        say: receives a line if visits are left out, because the budget is full.

    Raises ValueError if the traces share no prompt with this run, use another tokenizer, or contain a line that is no
    trace. Batches may have been yielded before.
    """
    return _batches(_entries(path, prompts, budget_bytes=budget_bytes, say=say))


def _entries(
    path: Path, prompts: Mapping[str, TokenIds], *, budget_bytes: int, say: Callable[[str], None]
) -> Iterator[tuple[int, PastResponse]]:
    agrees: dict[str, bool] = {}
    free_bytes, num_prompts = budget_bytes, 0
    newest_step: int | None = None
    for file in reversed(trace_files(path)):
        visits = _last_visits(file, prompts, agrees)
        if len(agrees) >= _ENOUGH_PROMPTS:
            _check_same_tokenizer(path, agrees, prompts)
        ends = accumulate(visit.num_bytes for visit in visits)
        fitting = [visit for visit, end in zip(visits, ends, strict=True) if end <= free_bytes]
        free_bytes -= sum(visit.num_bytes for visit in fitting)
        num_prompts += len(fitting)
        if fitting:
            newest_step = fitting[0].step if newest_step is None else newest_step
            yield from _read(file, fitting, newest_step)
        if len(fitting) < len(visits):
            say(
                f"`history.budget_bytes` = {budget_bytes} holds the newest {num_prompts} prompts of "
                f"`history.warm_start` = {path}; older ones are left out"
            )
            break
    _check_same_tokenizer(path, agrees, prompts)


def _last_visits(file: Path, prompts: Mapping[str, TokenIds], agrees: dict[str, bool]) -> list[_Visit]:
    """The last visit in a file of each prompt that no newer file holds, the newest first.

    `agrees` names the prompts of newer files and receives those of this one: whether their token ids are equal. Visits
    of prompts with other token ids are left out.
    """
    visits: dict[str, _Visit] = {}
    for line, trace in enumerate(read_traces(file), start=1):
        name = trace.prompt_id
        if name not in prompts or (name in agrees and name not in visits):
            continue
        if name not in visits or trace.step > visits[name].step:
            visits[name] = _Visit(step=trace.step)
            agrees[name] = np.array_equal(trace.prompt_ids, prompts[name])
        if trace.step == visits[name].step:
            visits[name].lines.append(line)
            visits[name].num_bytes += 4 * len(trace.response_ids) + RESPONSE_BYTES
    same = [visit for name, visit in visits.items() if agrees[name]]
    return sorted(same, key=lambda visit: visit.step, reverse=True)


def _read(file: Path, visits: Sequence[_Visit], newest_step: int) -> Iterator[tuple[int, PastResponse]]:
    """Read visits; responses are numbered anew, because both groups of a prompt drawn twice in a step count from 0."""
    samples = {line: sample for visit in visits for sample, line in enumerate(visit.lines)}
    for line, trace in zip(sorted(samples), read_traces(file, only=samples), strict=True):
        yield (
            prompt_key(trace.prompt_id),
            PastResponse(
                token_ids=trace.response_ids,
                step=min(trace.step - newest_step, 0) - 1,
                sample=samples[line],
                reward=trace.reward,
            ),
        )


def _batches(entries: Iterable[tuple[int, PastResponse]]) -> Iterator[ResponseBatch]:
    """Join the entries into batches of some megabytes; a prompt may be in two batches."""
    batch: list[tuple[int, PastResponse]] = []
    num_tokens = 0
    for key, response in entries:
        batch.append((key, response))
        num_tokens += len(response.token_ids)
        if num_tokens >= _TOKENS_PER_BATCH:
            yield ResponseBatch.of(batch)
            batch, num_tokens = [], 0
    if batch:
        yield ResponseBatch.of(batch)


def _check_same_tokenizer(path: Path, agrees: Mapping[str, bool], prompts: Mapping[str, TokenIds]) -> None:
    """Refuse traces of another tokenizer or chat template: most shared prompts differ. Single prompts may be edited."""
    if not agrees:
        raise ValueError(
            f"`history.warm_start` = {path}: none of its prompts is one of this run's {len(prompts)}; leave it out, or "
            "name traces of the same data sets"
        )
    if 2 * sum(agrees.values()) < len(agrees):
        different = next(prompt_id for prompt_id, same in agrees.items() if not same)
        raise ValueError(
            f"`history.warm_start` = {path}: was made with another tokenizer or chat template: {len(agrees)} prompts "
            f"are also this run's, {len(agrees) - sum(agrees.values())} of them have other token ids, the first is "
            f"{different}; leave it out, or name traces of the same model family"
        )
