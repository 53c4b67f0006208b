"""One row of an evaluation, and the before/after table made of such rows.

Every row says in which format the engine held the weights: an 8-bit figure is never shown as if it were the BF16 one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """avg@k and pass@k of one named set under one weight format."""

    set_name: str
    data_source: str
    """The rows of the set that this figure is about; `all` for the whole set."""
    format: str
    """Format of the engine that sampled: `bf16`, `int8`, ..."""
    step: int
    """Finished steps of the run whose weights were evaluated; 0 is before training."""
    num_prompts: int
    samples_per_prompt: int
    """k"""
    average: float
    """avg@k: mean score over all samples."""
    passed: float
    """pass@k: share of prompts with at least one sample that scored above 0.5."""
    truncated: float
    """Share of samples cut by the token limit."""

    def as_row(self) -> dict[str, object]:
        """For `RunDirectory.append_evaluation`."""
        return dict(asdict(self))

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> Self:
        """The inverse of `as_row`; raises `TypeError` for a row with other fields."""
        return cls(**row)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """First and last evaluation of one set, one data source and one format."""

    before: EvaluationRow
    after: EvaluationRow

    @property
    def points(self) -> float:
        """Gain of avg@k in percentage points."""
        return 100 * (self.after.average - self.before.average)


def changes(rows: Iterable[EvaluationRow]) -> Sequence[Change]:
    """First and last row of each (set, data source, format), BF16 first within a set."""
    found: dict[tuple[str, str, str], list[EvaluationRow]] = {}
    for row in rows:
        found.setdefault((row.set_name, row.data_source, row.format), []).append(row)
    ordered = sorted(found, key=lambda key: (key[0], key[1] != "all", key[1], key[2] != "bf16", key[2]))
    by_step = {key: sorted(found[key], key=lambda row: row.step) for key in ordered}
    return [Change(before=of_key[0], after=of_key[-1]) for of_key in by_step.values()]
