"""A step's responses as people and benchmarks read them: rows of text, and traces of token ids.

Made in the scorer's process, which has the tokenizer; the controller never holds text.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from history.store.traces import Trace, write_traces
from rollout.data.tokenizer import Tokenizer
from rollout.types import GroupColumns, ScoredGroup


class SampleRow(TypedDict):
    """One line of `samples/step-N.jsonl`."""

    prompt_id: str
    sample: int
    data_source: str
    prompt: str
    response: str
    reward: float
    reward_status: str
    ground_truth: str
    length: int
    finish_reason: str
    versions: list[list[int]]
    """[weight version, tokens sampled under it], in order."""


def sample_rows(group: ScoredGroup, columns: GroupColumns, tokenizer: Tokenizer) -> list[SampleRow]:
    """One row per response of a group."""
    prompt = group.group.prompt
    text = tokenizer.decode(columns.prompt_ids)
    return [
        SampleRow(
            prompt_id=prompt.prompt_id,
            sample=sample,
            data_source=prompt.data_source,
            prompt=text,
            response=tokenizer.decode(columns.response(sample)),
            reward=score.reward,
            reward_status=score.status.value,
            ground_truth=prompt.ground_truth,
            length=group.summary.lengths[sample],
            finish_reason=group.summary.finish_reasons[sample].value,
            versions=[[span.weight_version, span.num_tokens] for span in group.summary.weight_spans[sample]],
        )
        for sample, score in enumerate(group.scores)
    ]


def write_rows(path: Path, rows: Sequence[SampleRow]) -> None:
    """Replace `path` by one line per row; a reader sees the old file or the new one."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    aside.replace(path)


def group_traces(group: ScoredGroup, columns: GroupColumns) -> list[Trace]:
    """One trace per response of a group."""
    return [
        Trace(
            step=group.group.step,
            prompt_id=group.group.prompt.prompt_id,
            sample=sample,
            prompt_ids=columns.prompt_ids,
            response_ids=columns.response(sample),
            reward=reward,
        )
        for sample, reward in enumerate(group.rewards)
    ]


def replace_traces(path: Path, traces: Sequence[Trace]) -> None:
    """Write the traces of a step; a repeated step replaces its file."""
    aside = path.with_name(path.name + ".partial")
    aside.unlink(missing_ok=True)
    write_traces(aside, traces)
    aside.replace(path)
