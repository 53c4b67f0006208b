"""First and last evaluation of a run side by side, per set, data source and weight format.

Every figure keeps the format that it was sampled in: an 8-bit one is never shown as if it were the BF16 one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.evaluation import EvaluationRow

FORMAT_LABELS = {"bf16": "BF16", "int8": "INT8 (8-bit engine)", "fp8_channel": "FP8 (8-bit engine)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """First and last evaluation of one set, one data source and one format."""

    before: EvaluationRow
    after: EvaluationRow

    @property
    def label(self) -> str:
        """Set and data source, as printed."""
        source = self.before.data_source
        return self.before.set_name if source == "all" else f"{self.before.set_name}/{source}"

    @property
    def format_label(self) -> str:
        """The engine's format, as printed."""
        return FORMAT_LABELS.get(self.before.format, self.before.format)

    @property
    def points(self) -> float:
        """Gain of avg@k in percentage points."""
        return 100 * (self.after.average - self.before.average)


def changes(rows: Iterable[EvaluationRow]) -> Sequence[Change]:
    """First and last row of each (set, data source, format); whole sets first, BF16 first within a set."""
    found: dict[tuple[str, str, str], list[EvaluationRow]] = {}
    for row in rows:
        found.setdefault((row.set_name, row.data_source, row.format), []).append(row)
    ordered = sorted(found, key=lambda key: (key[0], key[1] != "all", key[1], key[2] != "bf16", key[2]))
    by_step = [sorted(found[key], key=lambda row: row.step) for key in ordered]
    return [Change(before=of_key[0], after=of_key[-1]) for of_key in by_step]
