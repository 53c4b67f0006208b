"""Learns the cost of a forward while the engine runs: seconds by rows, verified tokens and context.

`history.drafting.draft_length` chooses draft lengths by these costs.

    T(B, N, C) = t_0 + rows(B) + tokens(N) + jump [N > B] + c C

`rows` and `tokens` are piecewise linear and rising. B counts requests, N computed tokens (one of each row, and its
draft), C tokens of keys and values read. All batch sizes share one fit: plain forwards of a full batch already predict
the cost of a small batch with many drafts. Coefficients are those of a prior (a table of
`benchmarks.rollout.step_time`, or `DEFAULT`) times fitted factors. Each forward counts relative to its own duration.
Neighbouring factors are weakly tied, so that segments without observations follow those with some.

Invariants: T never falls in N, B or C. One forward, however slow (a first compilation, a swapped-out process), moves
the fit by a bounded amount. Old forwards decay. Drafts in a little-tried segment cost less than the estimate until they
were tried a few times, but never beyond the next segment of N: exploration is bounded and never stops. If an engine
pads to given sizes, tokens up to the next size cost nothing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from history.jit import kernel

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

ROW_EDGES = (0, 8, 32, 128, 512, 1 << 30)
TOKEN_EDGES = (0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 1 << 30)
_NUM_ROW_SLOPES = len(ROW_EDGES) - 1
_NUM_TOKEN_SLOPES = len(TOKEN_EDGES) - 1
_BASE, _ROWS, _TOKENS = 0, 1, 1 + _NUM_ROW_SLOPES
_JUMP = _TOKENS + _NUM_TOKEN_SLOPES
_CONTEXT = _JUMP + 1
_NUM_COEFFICIENTS = _CONTEXT + 1

_FORGET = 1 - 1 / 512
"""Decay of an observation's weight per forward."""
_NUM_FIRST = 8
"""First forwards, whose median only scales the prior."""
_FIT_EVERY = 16
_NUM_ROUNDS = 8
_TIE = 0.001
"""Weight of the tie between neighbouring factors, in observations."""
_BOUND = 0.3
"""Relative error above which only the sign of an error counts (Huber loss)."""
_LARGEST_SURPRISE = 3.0
_LEAST_FACTOR = 1e-3
"""Least factor, relative to the scale: estimates must be positive, because errors are relative to them."""
_TRIED = 3.0
"""Observations of drafts in a segment after which their cost is the estimate."""
_DISCOUNT = 0.5
_EVIDENT = 0.5
"""Observations in a segment above which the next segment may be tried."""
_PLAIN = 4.0
"""Forwards without drafts, of a similar number of rows, that must be observed before drafts get a finite cost. The cost
of a draft is a difference."""


class Observation(NamedTuple):
    """One forward in which every row decodes."""

    num_rows: int
    num_tokens: int
    """Computed tokens: one of each row, and the drafts."""
    num_context_tokens: int
    """Tokens of all rows whose keys and values were already cached."""
    seconds: float


def _default() -> Floats:
    coefficients = np.zeros(_NUM_COEFFICIENTS)
    coefficients[_BASE] = 10e-3
    coefficients[_ROWS:_TOKENS] = 0.04e-3
    coefficients[_TOKENS:_JUMP] = 0.3e-3
    coefficients[_JUMP] = 0.1e-3
    coefficients[_CONTEXT] = 2.7e-8
    return coefficients


DEFAULT = _default()
"""Seconds of a pessimistic machine whose forward doubles at 32 tokens. Only ratios matter: the scale is fitted."""


class ForwardCostModel:
    """Cost model T of one engine. `observe` mutates; not thread-safe."""

    def __init__(self, *, prior: Floats | None = None, verify_sizes: Sequence[int] = (), known_tokens: int = 0) -> None:
        """Start from a prior.

        Args:
            prior: coefficients; None: `DEFAULT`.
            verify_sizes: token counts to which the engine pads forwards (CUDA graphs); no padding beyond the last.
            known_tokens: largest N at which the prior was measured; smaller N are not explored.
        """
        self.num_observed = 0
        self.num_explored = 0
        """Forwards with drafts in a segment of fewer than `_TRIED` observations."""
        self._prior = DEFAULT if prior is None else prior
        self._sizes = np.array(sorted(verify_sizes), dtype=np.int64)
        self._known_tokens = known_tokens
        self._first: list[Observation] = []
        self._scale = 1.0
        self._products = np.zeros((_NUM_COEFFICIENTS, _NUM_COEFFICIENTS))
        self._targets = np.zeros(_NUM_COEFFICIENTS)
        self._seen = np.zeros(_NUM_TOKEN_SLOPES)
        self._drafted = np.zeros(_NUM_TOKEN_SLOPES)
        self._plain = np.zeros(_NUM_TOKEN_SLOPES)
        self._theta = self._prior.copy()

    def observe(self, *, num_rows: int, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """Learn from a forward in which every row decoded. Do not report forwards with prompt chunks."""
        forward = Observation(num_rows, num_tokens, num_context_tokens, seconds)
        if not (0 < num_rows <= num_tokens and num_context_tokens >= 0 and 0 < seconds < np.inf):
            raise ValueError(f"{forward} is no decoding forward: needed: 0 < num_rows <= num_tokens, 0 < seconds < inf")
        self.num_observed += 1
        segment = _segment_of(num_tokens)
        if num_tokens > num_rows:
            self.num_explored += int(num_tokens > self._known_tokens and self._drafted[segment] < _TRIED)
            self._drafted *= _FORGET
            self._drafted[segment] += 1
        else:
            self._plain[segment] += 1
        self._plain *= _FORGET
        self._seen *= _FORGET
        self._seen[segment] += 1
        if self.num_observed <= _NUM_FIRST:
            self._set_scale(forward)
        else:
            self._add(forward, memory=_FORGET)
            if self.num_observed % _FIT_EVERY == 0:
                self._fit()

    def _set_scale(self, forward: Observation) -> None:
        self._first.append(forward)
        ratios = [first.seconds / self._prior_seconds(first) for first in self._first]
        self._scale = float(np.median(ratios))
        self._theta = self._prior * self._scale
        if len(self._first) == _NUM_FIRST:
            self._fit_to(self._first)

    def _prior_seconds(self, forward: Observation) -> float:
        return float(_features(*forward[:3], self._sizes) @ self._prior)

    def _fit_to(self, forwards: Sequence[Observation]) -> None:
        """Fit to these forwards with equal weights; in rounds, because robust weights depend on the fit."""
        for _ in range(_NUM_ROUNDS):
            self._products[:] = 0
            self._targets[:] = 0
            for forward in forwards:
                self._add(forward, memory=1.0)
            self._fit()

    def _add(self, forward: Observation, *, memory: float) -> None:
        """Add a forward to the normal equations, in factors of the prior and relative to its estimate."""
        features = _features(*forward[:3], self._sizes)
        estimate = float(features @ self._theta)
        target = min(forward.seconds / estimate, _LARGEST_SURPRISE)
        weight = min(1.0, _BOUND / max(abs(target - 1), 1e-9))
        _accumulate(self._products, self._targets, features * self._prior / estimate, target, weight, memory)

    def _fit(self) -> None:
        """Solve least squares with factors >= 0: set negative factors to zero and solve for the rest again."""
        left = self._products + _TIE * _TIES
        right = self._targets + _TIE * _ANCHOR * self._scale
        factors = np.linalg.solve(left, right)
        free = factors >= 0
        while (factors < 0).any():
            factors = np.zeros(_NUM_COEFFICIENTS)
            factors[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
            free &= factors >= 0
        self._theta = np.maximum(factors, _LEAST_FACTOR * self._scale) * self._prior

    def seconds(self, num_rows: int, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Estimated duration of a forward."""
        return _seconds(num_rows, num_tokens, num_context_tokens, self._theta, self._sizes)

    def seconds_by_tokens(self, num_rows: int, max_tokens: int, num_context_tokens: int = 0) -> Floats:
        """Return the cost of drafting 0, 1, .. tokens in all, [max_tokens - num_rows + 1], seconds; never falls.

        The cost is below `seconds` in little-tried segments, and infinite beyond the segment after the largest forward
        seen. All drafts cost infinity until enough plain forwards were observed; this call counts as one.
        """
        return _by_tokens(
            num_rows,
            max_tokens,
            num_context_tokens,
            self._known_tokens,
            Fit(theta=self._theta, seen=self._seen, drafted=self._drafted, plain=self._plain, sizes=self._sizes),
        )

    # -- tables ------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls, path: Path, *, only: Mapping[str, str] | None = None, verify_sizes: Sequence[int] = ()
    ) -> "ForwardCostModel":
        """Fit the prior to the rows of a record of `benchmarks.rollout.step_time` or of `save`.

        Args:
            path: the file.
            only: fields and values of the rows to use, such as `{"model": "7B", "format": "int8"}`.
            verify_sizes: as for the constructor.

        Raises:
            ValueError: the file is no such record, or holds no such rows.
        """
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            selected = [row for row in rows if all(row.get(key) == value for key, value in (only or {}).items())]
            measured = [row for row in selected if "seconds" in row]
            forwards = [Observation(*(row[field] for field in Observation._fields)) for row in measured]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record of `python -m benchmarks.rollout.step_time`: {error!r}") from error
        if not forwards:
            raise ValueError(f"{path} has no row with {dict(only or {})}; it has {len(rows)} others")
        return cls.fitted(forwards, verify_sizes=verify_sizes)

    @classmethod
    def fitted(cls, forwards: Iterable[Observation], *, verify_sizes: Sequence[int] = ()) -> "ForwardCostModel":
        """Fit the prior to forwards with equal weights."""
        table = list(forwards)
        model = cls(verify_sizes=verify_sizes)
        model._scale = float(np.median([forward.seconds / model._prior_seconds(forward) for forward in table]))
        model._theta = DEFAULT * model._scale
        model._fit_to(table)
        known_tokens = max(forward.num_tokens for forward in table)
        return cls(prior=model._theta, verify_sizes=verify_sizes, known_tokens=known_tokens)

    def save(self, path: Path) -> None:
        """Write the estimates as rows of the same schema, up to the largest forward seen."""
        largest = max([1, *(TOKEN_EDGES[k + 1] for k in np.flatnonzero(self._seen > 0) if k + 1 < _NUM_TOKEN_SLOPES)])
        sizes = [size for size in TOKEN_EDGES[1:-1] if size <= max(largest, self._known_tokens)] or [1]
        rows = [
            Observation(num_rows, num_tokens, context, self.seconds(num_rows, num_tokens, context))._asdict()
            for num_rows in (1, *sizes)
            for num_tokens in (1, *sizes)
            for context in (0, num_rows * 4096)
            if num_rows <= num_tokens
        ]
        path.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def _tie_matrix() -> Floats:
    """Return the quadratic form of the differences between neighbouring factors; chains begin at the base factor."""
    rows, tokens = range(_ROWS, _TOKENS), range(_TOKENS, _JUMP)
    pairs = [(_BASE, _ROWS), (_BASE, _TOKENS), (_BASE, _JUMP), (_BASE, _CONTEXT)]
    pairs += [*pairwise(rows), *pairwise(tokens)]
    ties = np.diag(_ANCHOR)
    for a, b in pairs:
        ties[a, a] += 1
        ties[b, b] += 1
        ties[a, b] -= 1
        ties[b, a] -= 1
    return ties


_ANCHOR = np.full(_NUM_COEFFICIENTS, 0.01)
"""Weight that ties every factor to the scale of the first forwards, in units of `_TIE`."""
_TIES = _tie_matrix()


@kernel
def _segment_of(num_tokens: int) -> int:
    segment = 0
    while num_tokens > TOKEN_EDGES[segment + 1]:
        segment += 1
    return segment


@kernel
def _padded(num_tokens: int, sizes: Longs) -> int:
    for size in sizes:
        if size >= num_tokens:
            return int(size)
    return num_tokens


@kernel
def _features(num_rows: int, num_tokens: int, num_context_tokens: int, sizes: Longs) -> Floats:
    """Return the feature of each coefficient."""
    features = np.zeros(_NUM_COEFFICIENTS)
    features[_BASE] = 1
    for k in range(_NUM_ROW_SLOPES):
        features[_ROWS + k] = max(min(num_rows, ROW_EDGES[k + 1]) - ROW_EDGES[k], 0)
    padded = _padded(num_tokens, sizes)
    for k in range(_NUM_TOKEN_SLOPES):
        features[_TOKENS + k] = max(min(padded, TOKEN_EDGES[k + 1]) - TOKEN_EDGES[k], 0)
    features[_JUMP] = 1 if num_tokens > num_rows else 0
    features[_CONTEXT] = num_context_tokens
    return features


@kernel
def _accumulate(products: Floats, targets: Floats, row: Floats, target: float, weight: float, memory: float) -> None:
    for i in range(len(row)):
        targets[i] = memory * targets[i] + weight * row[i] * target
        for j in range(len(row)):
            products[i, j] = memory * products[i, j] + weight * row[i] * row[j]


@kernel
def _seconds(num_rows: int, num_tokens: int, num_context_tokens: int, theta: Floats, sizes: Longs) -> float:
    features = _features(num_rows, num_tokens, num_context_tokens, sizes)
    total = 0.0
    for k in range(_NUM_COEFFICIENTS):
        total += features[k] * theta[k]
    return total


class Fit(NamedTuple):
    """Arrays of a cost model, for one kernel."""

    theta: Floats
    seen: Floats
    """[segments]: decayed number of forwards."""
    drafted: Floats
    """[segments]: of forwards with drafts."""
    plain: Floats
    """[segments]: of forwards without drafts."""
    sizes: Longs


@kernel
def _by_tokens(num_rows: int, max_tokens: int, num_context_tokens: int, known_tokens: int, fit: Fit) -> Floats:
    seconds = np.full(max_tokens - num_rows + 1, np.inf)
    plain = _seconds(num_rows, num_rows, num_context_tokens, fit.theta, fit.sizes)
    seconds[0] = plain
    if fit.plain[_segment_of(num_rows)] < _PLAIN:
        # counted even if never observed: a new prompt may make the forward unusable
        fit.plain[_segment_of(num_rows)] += 1
        return seconds
    doubts = np.zeros(_NUM_TOKEN_SLOPES)
    highest = _segment_of(max(known_tokens, num_rows))
    for k in range(_NUM_TOKEN_SLOPES):
        if fit.seen[k] > _EVIDENT:
            highest = max(highest, k)
        if known_tokens == 0 or k > _segment_of(known_tokens):
            doubts[k] = _DISCOUNT * min(max(1 - fit.drafted[k] / _TRIED, 0.0), 1.0)
    # most tokens of a forward that may be explored
    limit = TOKEN_EDGES[min(highest + 2, _NUM_TOKEN_SLOPES)]
    priced = _padded(num_rows, fit.sizes)
    segment = _segment_of(priced)
    price = plain + (1 - doubts[_segment_of(num_rows + 1)]) * fit.theta[_JUMP]
    size = 0
    for num_tokens in range(num_rows + 1, min(max_tokens, limit) + 1):
        while size < len(fit.sizes) and fit.sizes[size] < num_tokens:
            size += 1
        padded = fit.sizes[size] if size < len(fit.sizes) else num_tokens
        while priced < padded:
            priced += 1
            while priced > TOKEN_EDGES[segment + 1]:
                segment += 1
            price += (1 - doubts[segment]) * fit.theta[_TOKENS + segment]
        seconds[num_tokens - num_rows] = price
    return seconds
