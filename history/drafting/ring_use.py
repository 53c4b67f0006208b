"""Decides whether forwards search the ring of recent responses: in every forward while it pays, else seldom."""

from history.drafting.state import Doubles, Longs
from history.jit import kernel

RING_TRIAL_EVERY = 16
"""Forwards between two searches of a ring that does not pay."""
TRIALS = 32
"""Forwards with ring search before its gain is evaluated."""
FEW_TRIALS, ENOUGH_ACCEPTED = 8, 4000
"""Forwards and accepted tokens before the evaluation in a large batch. Fewer may misjudge: see decision 19."""
_MIN_GAIN = 0.05
"""Least share of accepted tokens that the ring must add. A search takes about a millisecond for 256 rows, a twentieth
of a forward of 20 ms."""

PAYS, NUM_TRIALS, NUM_GAINED, NUM_ACCEPTED = range(4)
"""Columns of `DraftState.ring_trials`. NUM_GAINED, NUM_ACCEPTED: tokens of the trials, as of `DraftState.sums`."""


@kernel
def decide_ring_use(uses_ring: Longs, trials: Doubles, num_gained: float, num_accepted: float, is_trial: bool) -> None:
    """Decide for this forward, from the tokens that the last forward gained and accepted.

    Args:
        uses_ring: [1], of `DraftState`; changed.
        trials: [4], `ring_trials` of `DraftState`; changed.
        num_gained: tokens that only the ring brought.
        num_accepted: all accepted tokens.
        is_trial: search in any case.
    """
    if uses_ring[0]:
        trials[NUM_TRIALS] += 1
        trials[NUM_GAINED] += num_gained
        trials[NUM_ACCEPTED] += num_accepted
    if trials[NUM_TRIALS] >= (FEW_TRIALS if trials[NUM_ACCEPTED] >= ENOUGH_ACCEPTED else TRIALS):
        trials[PAYS] = 1.0 if trials[NUM_GAINED] > _MIN_GAIN * trials[NUM_ACCEPTED] else 0.0
        # earlier trials keep half their weight, so that one bad stretch does not change the decision
        trials[NUM_TRIALS] = 0
        trials[NUM_GAINED] /= 2
        trials[NUM_ACCEPTED] /= 2
    uses_ring[0] = 1 if trials[PAYS] > 0 or is_trial else 0
