"""Records each prompt's response lengths by visit, and estimates the lengths of its next responses.

The controller owns the book of a run: it sees the lengths of every group, whether engines draft or not. The book keeps
the last visits of a prompt only; older ones have little weight (`history.lengths.estimate`).

Invariants (`check_integrity`): visits of a prompt ascend by step, and each has at least one length. The prior is the
mean of all stored lengths.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from history.lengths.estimate import OLDER, PRIOR_MEAN, PRIOR_WEIGHT, LengthEstimate
from history.lengths.reuse import rank_correlation

KEPT_VISITS = 3
_RECENT = 1024
"""Number of recent forecasts that `metrics` evaluates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The responses of one prompt in one step."""

    step: int
    lengths: tuple[int, ...]
    """Tokens, at least 1 each."""


class LengthBook:
    """Response lengths by prompt key. `observe` and `load` mutate."""

    def __init__(self) -> None:
        self._visits: dict[int, deque[Visit]] = {}
        self._sum = self._count = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return len(self._visits)

    @property
    def prior_mean(self) -> float:
        """Expected length of a response to an unseen prompt."""
        return self._sum / self._count if self._count else PRIOR_MEAN

    def expected(self, key: int) -> float:
        """Mean of `estimate(key)`, without computing the other fields."""
        weighted, total, weight = PRIOR_WEIGHT * self.prior_mean, PRIOR_WEIGHT, 1.0
        for visit in reversed(self._visits.get(key, ())):
            weighted += weight * sum(visit.lengths)
            total += weight * len(visit.lengths)
            weight *= OLDER
        return weighted / total

    def estimate(self, key: int) -> LengthEstimate:
        """Estimate the lengths of a prompt's next responses."""
        visits = self._visits.get(key, ())
        return LengthEstimate.of(
            [length for visit in visits for length in visit.lengths],
            steps=[visit.step for visit in visits for _ in visit.lengths],
            prior_mean=self.prior_mean,
        )

    def observe(self, key: int, step: int, lengths: Sequence[int]) -> None:
        """Record the lengths of a prompt's responses, in tokens; empty responses are ignored.

        If the prompt was seen before, `metrics` compares its forecast with these lengths.
        """
        observed = tuple(int(length) for length in lengths if length > 0)
        if not observed:
            return
        visits = self._visits.get(key)
        if visits is None:
            visits = self._visits[key] = deque()
        else:
            self._recent.append((self.expected(key), float(np.mean(observed))))
        if visits and visits[-1].step == step:
            observed = visits[-1].lengths + observed
            self._forget(visits.pop())
        visits.append(Visit(step=step, lengths=observed))
        self._sum += sum(observed)
        self._count += len(observed)
        if len(visits) > KEPT_VISITS:
            self._forget(visits.popleft())

    def _forget(self, visit: Visit) -> None:
        self._sum -= sum(visit.lengths)
        self._count -= len(visit.lengths)

    def correlation(self) -> float:
        """Rank correlation of forecast and measured lengths over recent groups of known prompts; NaN for too few."""
        return rank_correlation(*self._columns()) if len(self._recent) > 2 else float("nan")

    def metrics(self) -> dict[str, float]:
        """Return the quality of recent forecasts; empty with fewer than three forecasts."""
        if len(self._recent) < 3:
            return {}
        expected, measured = (np.array(column) for column in self._columns())
        metrics = {"planner/forecast_error": float(np.median(np.abs(np.log(expected / measured))))}
        correlation = self.correlation()
        return metrics if np.isnan(correlation) else {**metrics, "planner/forecast_correlation": correlation}

    def _columns(self) -> tuple[list[float], list[float]]:
        return [expected for expected, _ in self._recent], [measured for _, measured in self._recent]

    def save(self, path: Path) -> None:
        """Write all lengths, but not the recent forecasts, into an `.npz` file."""
        rows = [(key, visit) for key, visits in self._visits.items() for visit in visits]
        np.savez(
            path,
            keys=np.array([key for key, _ in rows], dtype=np.uint64),
            steps=np.array([visit.step for _, visit in rows], dtype=np.int64),
            counts=np.array([len(visit.lengths) for _, visit in rows], dtype=np.int64),
            lengths=np.array([length for _, visit in rows for length in visit.lengths], dtype=np.int64),
        )

    def load(self, path: Path) -> None:
        """Add the lengths of a file written by `save`."""
        with np.load(path, allow_pickle=False) as file:
            keys, steps, counts, lengths = (file[name].tolist() for name in ("keys", "steps", "counts", "lengths"))
        first = 0
        for key, step, count in zip(keys, steps, counts, strict=True):
            self.observe(key, step, lengths[first : first + count])
            first += count
        self._recent.clear()

    def check_integrity(self) -> None:
        """Assert the invariants."""
        all_visits = [visit for visits in self._visits.values() for visit in visits]
        assert all(visit.lengths and min(visit.lengths) > 0 for visit in all_visits)
        for visits in self._visits.values():
            steps = [visit.step for visit in visits]
            assert steps == sorted(set(steps)) and 0 < len(steps) <= KEPT_VISITS
        assert self._sum == sum(sum(visit.lengths) for visit in all_visits)
        assert self._count == sum(len(visit.lengths) for visit in all_visits)
