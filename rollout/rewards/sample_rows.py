"""Writes the responses of a step: rows of text for people, and traces of token ids for benchmarks.

Runs in the process that has the tokenizer (`rollout.rewards.text_actor`); the controller never holds text.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from history.own_files import opener
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


class SampleWriter:
    """Writes the files of a step; a repeated step replaces its files."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def write(
        self,
        groups: Sequence[tuple[ScoredGroup, GroupColumns]],
        *,
        samples_path: Path,
        traces_path: Path | None,
        num_returned: int,
    ) -> list[SampleRow]:
        """Write one row per response to `samples_path`, and one trace per response to `traces_path` if given.

        Returns the first `num_returned` rows. A reader of a file sees the old content or the new.
        """
        rows = [row for group, columns in groups for row in self._rows(group, columns)]
        _replace_rows(samples_path, rows)
        if traces_path is not None:
            _replace_traces(traces_path, [trace for group, columns in groups for trace in _traces(group, columns)])
        return rows[:num_returned]

    def _rows(self, group: ScoredGroup, columns: GroupColumns) -> list[SampleRow]:
        prompt = group.group.prompt
        text = self._tokenizer.decode(columns.prompt_ids)
        return [
            SampleRow(
                prompt_id=prompt.prompt_id,
                sample=sample,
                data_source=prompt.data_source,
                prompt=text,
                response=self._tokenizer.decode(columns.response(sample)),
                reward=score.reward,
                reward_status=score.status.value,
                ground_truth=prompt.ground_truth,
                length=group.summary.lengths[sample],
                finish_reason=group.summary.finish_reasons[sample].value,
                versions=[[span.weight_version, span.num_tokens] for span in group.summary.weight_spans[sample]],
            )
            for sample, score in enumerate(group.scores)
        ]


def _traces(group: ScoredGroup, columns: GroupColumns) -> list[Trace]:
    return [
        Trace(
            step=group.group.step,
            prompt_id=group.group.prompt.prompt_id,
            sample=sample,
            prompt_ids=columns.prompt_ids,
            response_ids=columns.response(sample),
            reward=math.nan if group.is_left_out(sample) else reward,
        )
        for sample, reward in enumerate(group.rewards)
    ]


def _replace_rows(path: Path, rows: Sequence[SampleRow]) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", opener=opener) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    partial.replace(path)


def _replace_traces(path: Path, traces: Sequence[Trace]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # `write_traces` appends
    write_traces(partial, traces)
    partial.replace(path)
