"""Reads the history of another run to start from: a snapshot's folder, or recorded traces.

Traces name no tokenizer. The prompts that both runs share reveal it: their token ids must be equal.

Invariant: responses of another run have steps below 0, in their old order, so that all responses of this run are newer.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from history.store.response_batch import ResponseBatch
from history.store.snapshot import MANIFEST
from history.store.traces import Trace, read_traces
from history.types import PastResponse, TokenIds, prompt_key

_TOKENS_PER_BATCH = 1 << 21


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


def read_warm_start(path: Path, prompts: Mapping[str, TokenIds]) -> list[ResponseBatch]:
    """Read the last visit of each prompt of this run; `prompts` are their token ids, by prompt id.

    Raises ValueError if the traces share no prompt with this run, use another tokenizer, or contain a line that is no
    trace.
    """
    visits: dict[str, list[Trace]] = {}
    agrees: dict[str, bool] = {}
    for trace in (trace for file in trace_files(path) for trace in read_traces(file)):
        if trace.prompt_id not in prompts:
            continue
        if trace.prompt_id not in agrees:
            agrees[trace.prompt_id] = np.array_equal(trace.prompt_ids, prompts[trace.prompt_id])
        visit = visits.get(trace.prompt_id, [])
        if not visit or trace.step >= visit[-1].step:
            visits[trace.prompt_id] = [*(earlier for earlier in visit if earlier.step == trace.step), trace]
    _check_same_tokenizer(path, agrees, prompts)
    last_step = max(visit[-1].step for visit in visits.values())
    entries = [
        (prompt_key(prompt_id), _past(trace, trace.step - last_step - 1))
        for prompt_id, visit in visits.items()
        if agrees[prompt_id]
        for trace in visit
    ]
    return _batches(entries)


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


def _past(trace: Trace, step: int) -> PastResponse:
    return PastResponse(token_ids=trace.response_ids, step=step, sample=trace.sample, reward=trace.reward)


def _batches(entries: list[tuple[int, PastResponse]]) -> list[ResponseBatch]:
    """Split the entries into batches of some megabytes; a prompt may be in two batches."""
    ends = np.cumsum([len(response.token_ids) for _, response in entries]) // _TOKENS_PER_BATCH
    cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(entries)]
    return [ResponseBatch.of(entries[start:end]) for start, end in pairwise(cuts)]
