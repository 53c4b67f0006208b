"""Chooses the draft length of each row, so as to maximise the expected tokens per second of the batch.

A batch of R rows emits sum_i w_i (1 + sum_{k <= l_i} s_ik) weighted tokens in T(R, N) seconds, where s_ik
is the probability that token k of row i's draft survives, l_i the length drafted, N = R + sum l_i, and
w_i the row's makespan weight. Survival never rises along a draft. For a given N the best choice is therefore the
N - R largest w_i s_ik, for every cost model; all N are tried. The rule equals "draft a token iff
s_ik >= G (dT/dN) / w_i", with G tokens per second, but needs no smooth T.

Invariants: under the model the choice is never worse than drafting nothing, and all lengths are zero if drafts cannot
pay. The only approximation: tokens with values within 1/128 count as equal.
"""

import numpy as np
import numpy.typing as npt

from history.drafting.state import GROUP, PROMPT_LENGTH, REST_POINTS, Doubles, Floats, Longs
from history.jit import kernel
from history.types import TokenIds

_MIN_GAIN = 1.01
"""Least gain in tokens per second for which tokens are drafted; smaller gains are within the model's error."""
_OCTAVES, _BINS_PER_OCTAVE = 16, 128
_LEAST = 2.0**-10
"""Bins cover `_OCTAVES` powers of two from this value. A token of smaller value is never worth its forward."""
_NUM_BINS = _OCTAVES * _BINS_PER_OCTAVE


@kernel
def choose_draft_lengths(
    survivals: npt.NDArray[np.float32],
    available: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
) -> npt.NDArray[np.int32]:
    """Return the draft length of each of R rows, int32 [R].

    Args:
        survivals: [R, K], probability that a token and all before it are accepted; values that rise along K are capped.
        available: [R], length of each candidate, at most K.
        weights: [R], positive; see `makespan_weights`.
        seconds: [E + 1], duration of a forward with 0..E drafted tokens in all; at most E are drafted.
    """
    num_rows = len(available)
    values = np.zeros(survivals.shape, dtype=np.float32)
    for row in range(num_rows):
        survival = np.float32(1.0)
        for k in range(available[row]):
            survival = min(survival, survivals[row, k])
            value = np.float32(min(survival * weights[row], 63.9))
            if value < _LEAST:
                break
            values[row, k] = value
    bins = (values.view(np.int32) - _FIRST_BITS) >> _BIN_SHIFT
    lowest, highest = _NUM_BINS, -1
    for row in range(num_rows):
        for k in range(available[row]):
            if bins[row, k] < 0:
                break
            lowest, highest = min(lowest, bins[row, k]), max(highest, bins[row, k])
    # other bins are empty
    counts = np.zeros(max(highest - lowest + 1, 0), dtype=np.int64)
    sums = np.zeros(len(counts))
    for row in range(num_rows):
        for k in range(available[row]):
            if bins[row, k] < 0:
                break
            counts[bins[row, k] - lowest] += 1
            sums[bins[row, k] - lowest] += values[row, k]
    num_drafted, last_bin, num_of_last = _best_prefix(counts, sums, weights.sum(), seconds)
    last_bin += lowest
    lengths = np.zeros(num_rows, dtype=np.int32)
    if num_drafted == 0:
        return lengths
    for row in range(num_rows):
        k = 0
        while k < available[row] and bins[row, k] > last_bin:
            k += 1
        while k < available[row] and bins[row, k] == last_bin and num_of_last > 0:
            k += 1
            num_of_last -= 1
        lengths[row] = k
    return lengths


_FIRST_BITS = int(np.float32(_LEAST).view(np.int32))
_BIN_SHIFT = 23 - 7
"""Positive floats sort like their bits. Seven mantissa bits are kept: 128 bins an octave."""


@kernel
def _best_prefix(
    counts: npt.NDArray[np.int64], sums: npt.NDArray[np.float64], undrafted: float, seconds: npt.NDArray[np.float64]
) -> tuple[int, int, int]:
    """Return the number of tokens of the best choice, its lowest bin, and the tokens taken from that bin."""
    best_rate = _MIN_GAIN * undrafted / seconds[0]
    best, best_bin, best_of_bin = 0, 0, 0
    gain, num = undrafted, 0
    for place in range(len(counts)):
        bin_ = len(counts) - 1 - place
        for j in range(counts[bin_]):
            num += 1
            if num >= len(seconds):
                return best, best_bin, best_of_bin
            gain += sums[bin_] / counts[bin_]
            if gain > best_rate * seconds[num]:
                best_rate = gain / seconds[num]
                best, best_bin, best_of_bin = num, bin_, j + 1
    return best, best_bin, best_of_bin


@kernel
def break_even(seconds: npt.NDArray[np.float64], num_rows: int) -> float:
    """Least mean survival of drafted tokens at which drafts pay; from 1 on, no draft can pay.

    `seconds` as in `choose_draft_lengths`.
    """
    least = np.inf
    for extra in range(1, len(seconds)):
        least = min(least, (seconds[extra] - seconds[0]) / extra)
    return float(least * num_rows / seconds[0])


@kernel
def makespan_weights(remaining: npt.NDArray[np.float64], floor: float, cap: float) -> npt.NDArray[np.float64]:
    """Return the weight of a token of each of R rows, [R]: expected remaining tokens over their mean, clipped.

    A step ends with its longest response, so a second saved on a long row is worth more.
    """
    weights = np.ones(len(remaining))
    mean = remaining.mean()
    if mean > 0:
        weights = np.minimum(np.maximum(remaining / mean, floor), cap)
    return weights


@kernel
def lengths_above(survivals: Floats, available: TokenIds, threshold: float) -> TokenIds:
    """Draft lengths without prices, [R]: tokens of a candidate while survival [R, K] reaches `threshold`."""
    lengths = np.zeros(len(available), dtype=np.int32)
    for row in range(len(available)):
        while lengths[row] < available[row] and survivals[row, lengths[row]] >= threshold:
            lengths[row] += 1
    return lengths


@kernel
def expected_remaining(rows: Longs, remaining: Doubles, draft_rows: Longs, num_tokens: TokenIds) -> Doubles:
    """Return the expected remaining tokens of each row; 0 for a row without a draft row."""
    expected = np.zeros(len(draft_rows))
    for row in range(len(draft_rows)):
        if draft_rows[row] >= 0:
            request = rows[draft_rows[row]]
            table = remaining[request[GROUP]]
            place = (num_tokens[row] - request[PROMPT_LENGTH]) / table[REST_POINTS]
            below = min(max(int(place), 0), REST_POINTS - 2)
            part = min(max(place - below, 0.0), 1.0)
            expected[row] = table[below] * (1 - part) + table[below + 1] * part
    return expected
