"""What no schedule can beat: computed from lengths and speeds alone, by none of the simulator's code.

The context of a response costs seconds for every forward wherever it runs, half its length on average: that part is
the same under every schedule. The rest of a forward is shared by those that run in it, so it is cheapest per token at
the number of responses for which that is least. A step also takes at least as long as its longest response does
alone, divided by the steps over which it may stretch.
"""

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]


def saturated_s(lengths: _Floats, *, fixed_s: _Floats, context_s: float, gains: _Floats, num_engines: int) -> float:
    """Seconds for responses of these lengths on engines that are always full.

    `fixed_s` and `gains` are [S + 1] by the number of responses in a forward (`engines.Speed`).
    """
    rows = np.arange(1, len(fixed_s))
    per_token = np.min(fixed_s[1:] / (rows * gains[1:]))
    of_context = context_s * np.sum(lengths * (lengths - 1)) / 2 / np.max(gains[1:])
    return float((np.sum(lengths) * per_token + of_context) / num_engines)


def longest_s(lengths: _Floats, *, fixed_s: _Floats, context_s: float, gains: _Floats, max_staleness: int) -> float:
    """Seconds of a step which the longest response of a step forces, if it may stretch over 1 + `max_staleness`
    steps.
    """
    longest = float(lengths.max())
    alone = np.min(fixed_s[1:] / gains[1:]) * longest + context_s * longest * (longest - 1) / 2 / np.max(gains[1:])
    return float(alone / (1 + max_staleness))
