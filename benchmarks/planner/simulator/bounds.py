"""Lower bounds on the time of any simulated schedule, from lengths and speeds alone and without the simulator's code.

Engines of exactly these speeds cannot be faster. Real engines can, if their speeds were fitted to other responses.
The context of a response adds the same seconds under every schedule; on average it is half the response's length. The
responses of a forward share the rest of its time, so the bound uses the number of responses with the least time per
token. A step also takes at least the time of its longest response alone, divided by the steps it may span.
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
    """Least seconds per step because of the longest response, which may span 1 + `max_staleness` steps."""
    longest = float(lengths.max())
    alone = np.min(fixed_s[1:] / gains[1:]) * longest + context_s * longest * (longest - 1) / 2 / np.max(gains[1:])
    return float(alone / (1 + max_staleness))
