"""Counters of drafting since the last report; counters of several engines can be added.

Invariant: every field is a sum, so reports add field by field, and a mean is a quotient of two sums.
"""

from dataclasses import dataclass, fields
from typing import Any

SOURCES = ("history", "live", "shared", "sticky")
"""Sources of a draft: the frozen history, the living text of the request and its siblings, the ring of other prompts'
recent responses, a cursor kept after a rejection."""

CALIBRATION_BINS = 20
"""Equal bins of the predicted survival probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """Sums over the forwards of one interval."""

    num_forwards: int = 0
    """Forwards for which the drafter was called (once per batch)."""
    num_rows: int = 0
    """Decoding rows of all forwards: the tokens of as many forwards without drafts."""
    num_emitted: int = 0
    """Tokens emitted by these rows."""
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by_source: tuple[int, ...] = (0,) * len(SOURCES)
    accepted_by_source: tuple[int, ...] = (0,) * len(SOURCES)
    calibration_count: tuple[int, ...] = (0,) * CALIBRATION_BINS
    """Draft tokens by predicted survival probability, including tokens that were cut."""
    calibration_predicted: tuple[float, ...] = (0.0,) * CALIBRATION_BINS
    """Sum of the predictions."""
    calibration_survived: tuple[int, ...] = (0,) * CALIBRATION_BINS
    """Tokens of each bin that survived."""
    num_requests: int = 0
    num_hits: int = 0
    """Requests whose prompt had a segment."""
    num_damaged: int = 0
    """Unreadable segments; their prompts are drafted without history."""
    propose_s: float = 0.0
    """Time inside the drafter."""
    saved_s: float = 0.0
    """Estimate by the cost model: time of one-token forwards for the same tokens, minus the time of these forwards."""

    def __add__(self, other: "DraftStats") -> "DraftStats":
        values: dict[str, Any] = {}
        for field in fields(self):
            first, second = getattr(self, field.name), getattr(other, field.name)
            if isinstance(first, tuple):
                values[field.name] = tuple(a + b for a, b in zip(first, second, strict=True))
            else:
                values[field.name] = first + second
        return DraftStats(**values)

    def metrics(self) -> dict[str, float]:
        """Return flat metrics; a mean without observations is left out."""
        metrics = {
            "history/drafted_tokens": float(self.num_drafted),
            "history/accepted_tokens": float(self.num_accepted),
            "history/damaged_segments": float(self.num_damaged),
            "history/propose_s": self.propose_s,
            "history/saved_s_estimated": self.saved_s,
        }
        means = {
            "history/tokens_per_forward": _mean(self.num_emitted, self.num_rows),
            "history/acceptance_rate": _mean(self.num_accepted, self.num_drafted),
            "history/calibration_error": self.calibration_error(),
            "history/hit_rate": _mean(self.num_hits, self.num_requests),
        }
        for name, accepted in zip(SOURCES, self.accepted_by_source, strict=True):
            means[f"history/accepted_share/{name}"] = _mean(accepted, self.num_accepted)
        return metrics | {name: mean for name, mean in means.items() if mean is not None}

    def calibration_error(self) -> float | None:
        """Expected calibration error: mean distance between predicted and observed survival, weighted by bin.

        None without draft tokens.
        """
        gaps = zip(self.calibration_predicted, self.calibration_survived, strict=True)
        return _mean(sum(abs(p - s) for p, s in gaps), sum(self.calibration_count))


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
