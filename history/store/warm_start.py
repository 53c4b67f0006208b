"""History of another run to begin with: a snapshot's folder, or recorded traces.

Traces name no tokenizer, so they are judged by what they show: the prompts that this run also has must
have been tokenised to the same ids.

Invariant: responses of another run have steps below 0, in their old order, so that whatever this run
samples is newer.
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
    """Whether `path` is a snapshot's folder, rather than traces."""
    return (path / MANIFEST).exists()


def trace_files(path: Path) -> list[Path]:
    """The jsonl files at `path`, in order of their steps."""
    found = sorted(path.glob("*.jsonl"), key=lambda file: (len(file.name), file.name)) if path.is_dir() else [path]
    return [file for file in found if file.exists()]


def warm_start_problems(path: Path) -> list[str]:
    """What is wrong with a warm start's path, as far as can be seen without reading it."""
    if is_snapshot(path) or trace_files(path):
        return []
    return [
        f"`history.warm_start` = {path}: neither a folder with a {MANIFEST} (`checkpoints/STEP/history` of a run), nor "
        "a jsonl file of traces, nor a folder of such files"
    ]


def read_warm_start(path: Path, prompts: Mapping[str, TokenIds]) -> list[ResponseBatch]:
    """The last visit of each prompt of this run; `prompts` are their token ids, by prompt id.

    Raises ValueError when the traces are about other prompts, or their tokens are another tokenizer's, or a line is
    not a trace.
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
            visits[trace.prompt_id] = [*(one for one in visit if one.step == trace.step), trace]
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
    """Some prompts may have been edited since; if most differ, it was another tokenizer or chat template."""
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
    """Of some megabytes each; one prompt may be in two."""
    ends = np.cumsum([len(response.token_ids) for _, response in entries]) // _TOKENS_PER_BATCH
    cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(entries)]
    return [ResponseBatch.of(entries[start:end]) for start, end in pairwise(cuts)]
