"""Evaluation sets: avg@k and pass@k of the scored groups.

The score of a response is the `acc` that its reward function reports (the convention of verl's data sets), otherwise
its reward. A response whose scoring failed scores 0, whatever `reward.failure_score` is: it has no `acc`, and the
reward may have another scale. avg@k is the mean score over all samples. pass@k is the share of prompts with at least
one sample that scored above `PASS_SCORE`.

Every row names the weight format of the engine, so an 8-bit figure is never shown as the BF16 figure. `comparable`
also separates rows by k, number of prompts, settings of the set and settings of the run: pass@4 is never shown beside
pass@16, 100 prompts never beside 200, answers of 1024 tokens never beside those of 8192, and scores of one reward
function never beside those of another. `changes` puts the first and the last of comparable rows side by side, and
`notes` says where there is no such pair. Scores of another scale than 0 to 1 are no accuracies:
their mean is shown without per cent and points, and `other_scales` says why.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Self

from rollout.config import EvalSetConfig
from rollout.types import Score, ScoredGroup, ScoreStatus

PASS_SCORE = 0.5
WHOLE_SET = "all"
"""`EvaluationRow.data_source` of figures of a whole set."""

_ROUNDING = 1e-6
"""Of an accuracy: a weighted sum of scores may be 1.0000000000000002."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """avg@k and pass@k of one named set under one weight format."""

    set_name: str
    data_source: str
    """Data source of the rows that the figure covers; `WHOLE_SET` for all of them."""
    format: str
    """Formats of the engine: `bf16`, `int8`, `int8_kv_fp8` with keys and values in FP8, ..."""
    step: int
    """Finished steps of the run whose weights were evaluated; 0 is before training."""
    num_prompts: int
    samples_per_prompt: int
    """k"""
    settings: str = ""
    """`settings_digest` of the set. Empty in rows of earlier versions, which are comparable among themselves only."""
    run_settings: str = ""
    """`run_settings_digest`. Empty in rows of earlier versions, which are comparable among themselves only."""
    average: float
    """avg@k: mean score over all samples."""
    passed: float
    """pass@k: share of prompts with at least one sample that scored above `PASS_SCORE`."""
    truncated: float
    """Share of samples that the token limit cut."""
    mean_length: float
    """Response tokens."""
    outside: float | None = None
    """The score farthest outside 0 to 1; None if there is none, and in rows of earlier versions."""

    @property
    def other_scale(self) -> float | None:
        """A score outside 0 to 1, or the mean of such scores; None if avg@k is an accuracy."""
        return self.outside if self.outside is not None else _outside([self.average])

    def as_row(self) -> dict[str, object]:
        """For `RunDirectory.append_evaluation`."""
        return dict(asdict(self))

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> Self:
        """The inverse of `as_row`; a row of an earlier version lacks `settings`, `run_settings` or `outside`.

        Fields of later versions are ignored.

        Raises:
            TypeError: a field is missing, or its value is of another type.
        """
        kinds: dict[str, type] = {each.name: each.type for each in fields(cls)}  # type: ignore[misc]
        values = {name: row[name] for name in kinds if name in row}
        for name, value in values.items():
            is_whole_number = kinds[name] is not str and isinstance(value, int)
            if not isinstance(value, kinds[name]) and not is_whole_number:
                raise TypeError(f"`{name}` = {value!r} is of another type")
        return cls(**values)  # type: ignore[arg-type]

    def metrics(self) -> dict[str, float]:
        """Metrics for wandb: `eval/SET/SOURCE/FORMAT/avg@K` and so on; without SOURCE for the whole set."""
        source = "" if self.data_source == WHOLE_SET else f"/{self.data_source}"
        prefix = f"eval/{self.set_name}{source}/{self.format}"
        return {
            f"{prefix}/avg@{self.samples_per_prompt}": self.average,
            f"{prefix}/pass@{self.samples_per_prompt}": self.passed,
            f"{prefix}/truncated": self.truncated,
            f"{prefix}/mean_length": self.mean_length,
        }


def settings_digest(config: EvalSetConfig) -> str:
    """Digest of what decides a set's answers beside weights and k: the bytes of its file, its limit, its sampling.

    It is equal on all machines, and a file may move. 16 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(config.path).open("rb") as file:
        content = hashlib.file_digest(file, "blake2b").hexdigest()
    values = config.model_dump(mode="json", exclude={"path", "samples_per_prompt"})
    return hashlib.blake2b(json.dumps([content, values], sort_keys=True).encode(), digest_size=8).hexdigest()


def run_settings_digest(
    *,
    template_arguments: Mapping[str, str | int | float | bool],
    stop_token_ids: Iterable[int],
    reward_function: str,
) -> str:
    """Digest of what decides the answers and scores of all sets: 16 hexadecimal digits, equal on all machines.

    Limits of reward functions are no part of it: they protect the machine, and few calls meet them.

    Args:
        template_arguments: of the chat template, by name.
        stop_token_ids: tokens that end a response, beside those of the model, in any order.
        reward_function: its dotted path.
    """
    values = [dict(template_arguments), sorted(set(stop_token_ids)), reward_function]
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def evaluation_rows(
    name: str, groups: Sequence[ScoredGroup], *, format: str, step: int, settings: str
) -> list[EvaluationRow]:
    """One row for the whole set, then one per `data_source` if the set has several."""
    sources = sorted({group.group.prompt.data_source for group in groups})
    rows = [_row(name, WHOLE_SET, groups, format=format, step=step, settings=settings)]
    if len(sources) > 1:
        for source in sources:
            members = [group for group in groups if group.group.prompt.data_source == source]
            rows.append(_row(name, source, members, format=format, step=step, settings=settings))
    return rows


def _row(
    name: str, source: str, groups: Sequence[ScoredGroup], *, format: str, step: int, settings: str
) -> EvaluationRow:
    accuracies = [[accuracy(score) for score in group.scores] for group in groups]
    scores = [score for of_group in accuracies for score in of_group]
    lengths = [length for group in groups for length in group.summary.lengths]
    return EvaluationRow(
        set_name=name,
        data_source=source,
        format=format,
        step=step,
        num_prompts=len(groups),
        samples_per_prompt=len(groups[0].group.seeds),
        settings=settings,
        average=fmean(scores),
        passed=fmean(max(samples) > PASS_SCORE for samples in accuracies),
        truncated=fmean(reason.is_truncated for group in groups for reason in group.summary.finish_reasons),
        mean_length=fmean(lengths),
        outside=_outside(scores),
    )


def accuracy(score: Score) -> float:
    """`acc` of the reward function's details if present, else the reward; 0 if scoring failed."""
    if score.status is not ScoreStatus.OK:
        return 0.0
    return dict(score.details).get("acc", score.reward)


def _outside(scores: Iterable[float]) -> float | None:
    """The score farthest outside 0 to 1; None if all lie inside, but for rounding."""
    distances = {score: max(-score, score - 1) for score in scores}
    farthest = max(distances, key=distances.__getitem__)
    return farthest if distances[farthest] > _ROUNDING else None


FORMAT_LABELS = {"bf16": "BF16", "int8": "INT8 (8-bit engine)", "fp8_channel": "FP8 (8-bit engine)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """First and last of `comparable` evaluations, of two different steps."""

    before: EvaluationRow
    after: EvaluationRow

    @property
    def label(self) -> str:
        """Set and data source, as printed."""
        source = self.before.data_source
        return self.before.set_name if source == WHOLE_SET else f"{self.before.set_name}/{source}"

    @property
    def format_label(self) -> str:
        """The engine's format, as printed."""
        return _format_label(self.before)

    @property
    def is_accuracy(self) -> bool:
        """Whether avg@k is an accuracy, from 0 to 1, in both rows."""
        return self.before.other_scale is None and self.after.other_scale is None

    @property
    def gain(self) -> float:
        """Gain of avg@k."""
        return self.after.average - self.before.average

    @property
    def points(self) -> float:
        """Gain of avg@k in percentage points; only an accuracy has them."""
        return 100 * self.gain


def comparable(rows: Iterable[EvaluationRow]) -> Sequence[Sequence[EvaluationRow]]:
    """Rows of the same set, data source, format, k, number of prompts, and settings of set and run, by step.

    Whole sets come first, BF16 first within a set, then smaller k, fewer prompts, and settings recorded first.
    """
    by_key: dict[tuple[str, str, str, int, int, str, str], list[EvaluationRow]] = {}
    for row in rows:
        counts = row.samples_per_prompt, row.num_prompts
        key = (row.set_name, row.data_source, row.format, *counts, row.settings, row.run_settings)
        by_key.setdefault(key, []).append(row)
    ordered = sorted(by_key, key=lambda key: (key[0], key[1] != WHOLE_SET, key[1], key[2] != "bf16", *key[2:5]))
    return [sorted(by_key[key], key=lambda row: row.step) for key in ordered]


def changes(rows: Iterable[EvaluationRow]) -> Sequence[Change]:
    """The first and the last of each `comparable` rows; none of rows of a single step."""
    return [
        Change(before=of_key[0], after=of_key[-1]) for of_key in comparable(rows) if of_key[0].step < of_key[-1].step
    ]


def not_compared(rows: Iterable[EvaluationRow]) -> Sequence[str]:
    """A sentence for each set and format whose first and last evaluation are not `comparable`: it says why.

    Only rows of whole sets count.
    """
    by_set: dict[tuple[str, str], list[EvaluationRow]] = {}
    for row in rows:
        if row.data_source == WHOLE_SET:
            by_set.setdefault((row.set_name, row.format), []).append(row)
    return [_why_not_compared(of_set) for of_set in by_set.values() if not _spanned(of_set)]


def _spanned(of_set: Sequence[EvaluationRow]) -> bool:
    """Whether one change goes from the first step to the last, or there is one step only."""
    ends = min(row.step for row in of_set), max(row.step for row in of_set)
    return ends[0] == ends[1] or ends in [(change.before.step, change.after.step) for change in changes(of_set)]


def notes(rows: Sequence[EvaluationRow]) -> Sequence[str]:
    """Sentences below a table of `changes`: which sets are not in it (`not_compared`), or in it without points."""
    compared = [row for change in changes(rows) for row in (change.before, change.after)]
    return [*not_compared(rows), *other_scales(compared).values()]


def other_scales(rows: Iterable[EvaluationRow]) -> Mapping[str, str]:
    """By set name, a sentence for each set with scores outside 0 to 1: its avg@k is no accuracy, and how to get one."""
    found: dict[str, float] = {}
    for row in rows:
        if (score := row.other_scale) is not None:
            found.setdefault(row.set_name, score)
    return {
        name: (
            f"{name}: the score {score:g} is not between 0 and 1, so avg@k is a mean score and no accuracy; let the "
            "reward function return an accuracy from 0 to 1 as `acc` beside `score`"
        )
        for name, score in found.items()
    }


def _why_not_compared(rows: Sequence[EvaluationRow]) -> str:
    numbers = {
        "k": {row.samples_per_prompt for row in rows},
        "number of prompts": {row.num_prompts for row in rows},
    }
    reasons = [f"{name} ({_listed(values)})" for name, values in numbers.items() if len(values) > 1]
    digests = {
        "the set's file, limit or sampling": {row.settings for row in rows},
        "the chat template's arguments, stop tokens or reward function": {row.run_settings for row in rows},
    }
    for name, found in digests.items():
        if len(found) > 1:
            unknown = " (which an earlier version did not record)" if "" in found else ""
            reasons.append(f"{name}{unknown}")
    every = "all " if changes(rows) else ""
    return (
        f"{rows[0].set_name}, {_format_label(rows[0])}: the evaluations after {_listed({row.step for row in rows})} "
        f"steps are not {every}compared, because they differ in {', '.join(reasons)}"
    )


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))


def _format_label(row: EvaluationRow) -> str:
    return FORMAT_LABELS.get(row.format, row.format)
