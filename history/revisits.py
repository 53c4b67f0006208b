"""When a prompt comes back: the expected wait, from how long ago it was seen.

A data set is walked in epochs, each shuffled anew, so the steps between two visits of a prompt are the
sum of two uniform numbers: triangular on [0, 2E] around the length E of an epoch. What was seen long ago
therefore comes back *soon*, until it is older than two epochs and does not come back at all: the
opposite of what a least-recently-used cache assumes, which on such a walk keeps nothing that it needs.
"""

import numpy as np
import numpy.typing as npt


def expected_wait(ages: npt.NDArray[np.float64], epoch: float) -> npt.NDArray[np.float64]:
    """Mean steps until prompts that were last seen `ages` steps ago are seen again, [P]; inf beyond two epochs.

    The mean residual of the triangular distribution on [0, 2 * `epoch`]; `epoch` is in steps, positive.
    """
    x = np.clip(ages / epoch, 0.0, 2.0)
    early = ((1 - x) - (1 - x**3) / 6 + 1 / 6) / np.maximum(1 - x**2 / 2, 0.5)
    late = (2 - x) / 3
    waits: npt.NDArray[np.float64] = np.where(x < 1, early, late) * epoch
    return np.where(ages > 2 * epoch, np.inf, waits)
