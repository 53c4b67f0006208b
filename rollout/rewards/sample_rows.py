"""Writes the responses of a step: rows of text for people, and traces of token ids for benchmarks.

Runs in the process that has the tokenizer (`rollout.rewards.text_actor`); the controller never holds text.
Rows hold whole characters: `rollout.data.rows` refuses others, and tokenizers decode other bytes as U+FFFD.
"""

import json
import math
from collections.abc import Iterable
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
        groups: Iterable[tuple[ScoredGroup, GroupColumns]],
        *,
        samples_path: Path,
        traces_path: Path | None,
        num_returned: int,
    ) -> list[SampleRow]:
        """Write one row per response to `samples_path`, and one trace per response to `traces_path` if given.

        Returns the first `num_returned` rows. A reader of a file sees the old content or the new. Groups are taken and
        written one after another, because the tokens of a large step would fill the memory of a process.
        """
        returned: list[SampleRow] = []
        samples_partial = samples_path.with_name(samples_path.name + ".partial")
        traces_partial = None if traces_path is None else traces_path.with_name(traces_path.name + ".partial")
        if traces_partial is not None:
            traces_partial.unlink(missing_ok=True)  # `write_traces` appends
            write_traces(traces_partial, ())
        with open(samples_partial, "w", encoding="utf-8", opener=opener) as file:
            for group, columns in groups:
                rows = self._rows(group, columns)
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                returned += rows[: num_returned - len(returned)]
                if traces_partial is not None:
                    write_traces(traces_partial, _traces(group, columns))
        samples_partial.replace(samples_path)
        if traces_partial is not None and traces_path is not None:
            traces_partial.replace(traces_path)
        return returned

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
