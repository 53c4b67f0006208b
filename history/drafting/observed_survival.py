"""Corrects the survival of drafts by what survived recently, when a history becomes useless."""

import numpy as np

from history.drafting.acceptance import NUM_BINS
from history.drafting.state import PREDICTED, SURVIVED, Doubles, Floats
from history.jit import kernel
from history.types import TokenIds

_SURVIVAL_WINDOW = 64.0
"""Expected survivors over which observed survival is averaged."""
_MIN_DECAY = 0.75
"""Least decay factor of one forward, for any number of drafted tokens."""
_SURVIVAL_PRIOR, _SURVIVAL_BAND = 4.0, 2.0
"""Prior tokens of the ratio, and its tolerance: a ratio down to one half counts as chance."""


@kernel
def scale_to_observed_survival(recent: Doubles, sums: Doubles, survivals: Floats, available: TokenIds) -> None:
    """Lower all survivals if far fewer tokens survived recently than expected.

    Each cell's rate averages hundreds of tokens. When a history becomes useless, as for prompts with unrelated answers,
    all rates are too high at once.

    Args:
        recent: [4], changed. Tokens expected to survive and tokens that survived: of `sums` at the last call, then
            the decayed sums.
        sums: of `DraftState`.
        survivals: [R, K], changed.
        available: [R], candidate tokens of each row.
    """
    now = np.zeros(2)
    for i in range(NUM_BINS):
        now[0] += sums[PREDICTED + i]
        now[1] += sums[SURVIVED + i]
    decay = max(1.0 - (now[0] - recent[0]) / _SURVIVAL_WINDOW, _MIN_DECAY)
    for i in range(2):
        recent[2 + i] = decay * recent[2 + i] + now[i] - recent[i]
        recent[i] = now[i]
    factor = _SURVIVAL_BAND * (recent[3] + _SURVIVAL_PRIOR) / (recent[2] + _SURVIVAL_PRIOR)
    if factor < 1.0:
        for row in range(len(available)):
            for k in range(available[row]):
                survivals[row, k] *= factor
