"""Speed of a full engine, fitted to the forwards that a run has traced.

    seconds = fixed_s + token_s * tokens computed + context_s * tokens of context

The requests of a forward share the fixed part (reading weights, launching kernels). The rest is the cost of each
request, in a full engine as in an empty one. Let N requests fill the engine. A forward of n requests is then charged
n / N of the fixed part and all of the rest. This is *the time of the same tokens on a saturated engine*: only the fixed
cost is divided. A forward that took longer than the fit predicts is charged the same share: noise is not a bubble.

N is the highest concurrency of which the run has evidence, not the configured limit: an engine that was never full is
compared with its fullest forwards. Rejected draft tokens count as computed.

Invariants: shares lie in [0, 1]; a forward of N requests or more has share 1; too little evidence gives no speed.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.tracing.forwards import Forwards

MIN_FORWARDS = 64
"""Least number of forwards for a fit."""
NUM_EVIDENT = 8
"""Number of forwards that must have reached a concurrency for it to count."""
MAX_FITTED = 8192
"""Most forwards of a fit, evenly spread over the given ones."""
_NUM_ROUNDS = 8
_BOUND = 0.3
"""Relative error above which a forward counts less: a first compilation or a busy core must not move the fit."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """Cost of a forward, and the number of requests that fill it."""

    fixed_s: float
    """Seconds of any forward."""
    token_s: float
    """Seconds for each token computed."""
    context_s: float
    """Seconds for each token whose keys and values were already in the cache."""
    saturated_requests: int
    """N: the highest concurrency of which there is evidence."""

    def saturated_shares(self, forwards: Forwards) -> Floats:
        """Share of each forward's duration that a saturated engine would have needed, [N] in [0, 1]."""
        varying = self.token_s * forwards["num_scheduled_tokens"] + self.context_s * forwards["num_context_tokens"]
        fill = np.minimum(forwards["num_running"] / self.saturated_requests, 1.0)
        whole = self.fixed_s + varying
        return np.asarray(np.where(whole > 0, (self.fixed_s * fill + varying) / np.where(whole > 0, whole, 1), 1.0))


def fit_speed(forwards: Forwards) -> EngineSpeed | None:
    """Fit the speed to forwards of one kind of engine; None where there is too little evidence."""
    known = forwards[(forwards["seconds"] > 0) & (forwards["num_running"] > 0)]
    if len(known) < MIN_FORWARDS:
        return None
    saturated = int(np.partition(known["num_running"], -NUM_EVIDENT)[-NUM_EVIDENT])
    fitted = known[:: -(-len(known) // MAX_FITTED)]
    features = np.stack(
        [np.ones(len(fitted)), fitted["num_scheduled_tokens"], fitted["num_context_tokens"]], axis=1
    ).astype(np.float64)
    fixed_s, token_s, context_s = _fit(features, fitted["seconds"].astype(np.float64))
    return EngineSpeed(fixed_s=fixed_s, token_s=token_s, context_s=context_s, saturated_requests=saturated)


def _fit(features: Floats, seconds: Floats) -> tuple[float, float, float]:
    """Least squares of relative errors with coefficients >= 0; repeated, because weights depend on the fit."""
    estimate, trust = seconds, np.ones(len(seconds))
    coefficients = np.zeros(features.shape[1])
    for _ in range(_NUM_ROUNDS):
        weights = np.sqrt(trust) / estimate
        coefficients = _not_negative(features * weights[:, None], seconds * weights)
        estimate = np.maximum(features @ coefficients, 1e-9)
        trust = np.minimum(1.0, _BOUND / np.maximum(np.abs(seconds / estimate - 1), 1e-9))
    fixed_s, token_s, context_s = coefficients
    return float(fixed_s), float(token_s), float(context_s)


def _not_negative(features: Floats, targets: Floats) -> Floats:
    """Least squares; negative coefficients become zero and the rest is solved again."""
    coefficients, free = np.zeros(features.shape[1]), np.ones(features.shape[1], dtype=bool)
    while free.any():
        solved = np.linalg.lstsq(features[:, free], targets, rcond=None)[0]
        if (solved >= 0).all():
            coefficients[free] = solved
            break
        free[free] = solved >= 0
    return coefficients
