"""Records each prompt's response lengths by visit, and estimates the lengths of its next responses.

The controller owns the book of a run: it sees the lengths of every group, whether engines draft or not. The book keeps
the last visits of a prompt only; older ones have little weight (`history.lengths.estimate`).

A visit is the responses of one prompt in one step. A run can have millions, so each prompt has one small array.

Invariants (`check_integrity`): visits of a prompt ascend by step, and each has at least one length. The prior is the
mean of all stored lengths.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from history.lengths.estimate import OLDER, PRIOR_MEAN, PRIOR_WEIGHT, LengthEstimate
from history.lengths.reuse import rank_correlation

KEPT_VISITS = 3
_RECENT = 1024
"""Number of recent forecasts that `metrics` evaluates."""
_PROMPT_BYTES = 400
"""Most bytes of a prompt beside its responses: header of its array, key, entry of the table; more while it is saved."""
_RESPONSE_BYTES = 20
"""Of a response: step and length, a copy of both while the book is saved, and a buffer of the file."""

_DAMAGE = (BadZipFile, EOFError, LookupError, RuntimeError, TypeError, zlib.error)
"""Errors of numpy and zipfile about a damaged file, beside `ValueError` and `OSError`."""

Ints = npt.NDArray[np.int32]
_NO_RESPONSES: Ints = np.zeros((2, 0), dtype=np.int32)


def most_bytes(*, num_visits: int, visit_responses: int) -> int:
    """Bound of the memory of a book with so many visits of so many responses, in bytes, also while it is saved."""
    return num_visits * (_PROMPT_BYTES + _RESPONSE_BYTES * visit_responses)


class LengthBook:
    """Response lengths by prompt key. `observe` and `load` mutate."""

    def __init__(self) -> None:
        self._responses: dict[int, Ints] = {}
        """By key: step and length (tokens, at least 1) of each response, [2, n]. Neighbours of one step are a visit."""
        self._sum = self._count = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def prior_mean(self) -> float:
        """Expected length of a response to an unseen prompt."""
        return self._sum / self._count if self._count else PRIOR_MEAN

    def expected(self, key: int) -> float:
        """Mean of `estimate(key)`, without computing the other fields."""
        weighted, total, weight = PRIOR_WEIGHT * self.prior_mean, PRIOR_WEIGHT, 1.0
        steps, lengths = self._responses.get(key, _NO_RESPONSES)
        cuts = [*_begins(steps).tolist(), len(lengths)]
        for first, last in reversed(list(pairwise(cuts))):
            weighted += weight * sum(lengths[first:last].tolist())
            total += weight * (last - first)
            weight *= OLDER
        return weighted / total

    def estimate(self, key: int) -> LengthEstimate:
        """Estimate the lengths of a prompt's next responses."""
        steps, lengths = self._responses.get(key, _NO_RESPONSES).tolist()
        return LengthEstimate.of(lengths, steps=steps, prior_mean=self.prior_mean)

    def observe(self, key: int, step: int, lengths: Sequence[int]) -> None:
        """Record the lengths of a prompt's responses, in tokens; empty responses are ignored.

        If the prompt was seen before, `metrics` compares its forecast with these lengths.
        """
        observed = [int(length) for length in lengths if length > 0]
        if not observed:
            return
        if key in self._responses:
            self._recent.append((self.expected(key), float(np.mean(observed))))
        added = np.array([[step] * len(observed), observed], dtype=np.int32)
        responses = np.concatenate([self._responses.get(key, _NO_RESPONSES), added], axis=1)
        first = int(_begins(responses[0])[-KEPT_VISITS:][0])
        self._responses[key] = responses[:, first:].copy()
        self._sum += sum(observed) - int(responses[1, :first].sum())
        self._count += len(observed) - first

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
        """Write all lengths, but not the recent forecasts, into an `.npz` file.

        `keys` (uint64), `steps` and `counts` have a value for each visit, `lengths` one for each response.
        """
        steps, lengths = np.concatenate([_NO_RESPONSES, *self._responses.values()], axis=1)
        sizes = [len(responses[0]) for responses in self._responses.values()]
        prompt_begins = np.cumsum([0, *sizes])[:-1]
        begins = np.union1d(prompt_begins, _begins(steps))
        prompts = np.searchsorted(prompt_begins, begins, side="right") - 1
        np.savez(
            path,
            keys=np.array(list(self._responses), dtype=np.uint64)[prompts],
            steps=steps[begins],
            counts=np.diff(begins, append=len(lengths)).astype(np.int32),
            lengths=lengths,
        )

    def load(self, path: Path) -> None:
        """Replace the book by that of a file written by `save`; older ones have all integers in 64 bits.

        Raises:
            ValueError: the file is damaged or holds something else, such as pickled objects; the book is as before.
            OSError: it cannot be read.
        """
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                keys, steps, counts, lengths = (file[name] for name in ("keys", "steps", "counts", "lengths"))
            responses = np.stack([np.repeat(steps, counts), lengths]).astype(np.int32, copy=False)
            visits = _begins(keys)
            cuts = np.append(0, np.cumsum(counts))[np.append(visits, len(keys))]
        except _DAMAGE as error:
            raise ValueError(f"{path} holds no response lengths ({type(error).__name__}: {error})") from error
        self._responses = {
            key: responses[:, first:last].copy()
            for key, (first, last) in zip(keys[visits].tolist(), pairwise(cuts.tolist()), strict=True)
        }
        self._sum, self._count = int(responses[1].sum()), len(lengths)
        self._recent.clear()

    def check_integrity(self) -> None:
        """Assert the invariants."""
        for responses in self._responses.values():
            steps = responses[0, _begins(responses[0])].tolist()
            assert steps == sorted(set(steps)) and 0 < len(steps) <= KEPT_VISITS
            assert responses.dtype == np.int32 and responses.base is None and responses[1].min() > 0
        assert self._sum == sum(int(responses[1].sum()) for responses in self._responses.values())
        assert self._count == sum(len(responses[1]) for responses in self._responses.values())


def _begins(values: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Where a value differs from the one before it; the first one does. [n] -> [runs of equal values]."""
    is_begin = np.ones(len(values), dtype=bool)
    is_begin[1:] = values[1:] != values[:-1]
    return np.flatnonzero(is_begin)
