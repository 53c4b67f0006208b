"""State of the drafter between forwards: flat arrays that kernels read and write (decision 47).

A *draft row* holds one request, a *group* all requests of one prompt in this process. This module names the columns of
both tables. Addresses point to arrays that `history.drafting.prompt_group.DraftGroup` keeps alive.

A *candidate* is a way to predict the next tokens: the longest matches in the history, the newest matches in the living
text, the newest matches in the ring, the cursor, and the cursor moved by an insertion or deletion.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from history.drafting.acceptance import (
    NUM_BINS,
    NUM_CANDIDATES,
    NUM_CORRECTIONS,
    NUM_ORIGINS,
    fresh_corrections,
    fresh_counts,
)
from history.drafting.recent_ring import NUM_BUCKETS as RING_BUCKETS
from history.drafting.recent_ring import NUM_PLACES, RING_TOKENS
from history.index.suffix_array import SEPARATOR
from history.jit import float32s_at, float64s_at, int32s_at, int64s_at, kernel
from history.types import TokenIds

Scalar = TypeVar("Scalar", bound=np.generic)
Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

HISTORY, LIVE, RING, STICKY, MOVED = range(NUM_CANDIDATES)

PROMPT_LENGTH, GROUP, SEEN, COUNTED_UP_TO, LIVE_END, LIVE_STOP = range(6)
CURSOR_TEXT, CURSOR, CURSOR_MATCH, LOST, CHOSEN, DRAFTED = range(6, 12)
"""Columns of a draft row. SEEN: tokens read. COUNTED_UP_TO: tokens counted, also while the drafter rests.
LIVE_END, LIVE_STOP: the request's region of the living text grows and ends there. CURSOR: the position expected next,
in CURSOR_TEXT. CURSOR_MATCH: tokens that the text followed the cursor. LOST: tokens since the cursor was right.
CHOSEN: the candidate drafted last (-1: none). DRAFTED: how many of its tokens."""
RING_END, RING_STOP = 12, 13
"""The request's newest region of the ring grows at RING_END and ends at RING_STOP; both 0: no region."""
OTHERWISE = 14
"""The candidate that would be drafted without the ring (-1: none)."""
NUM_ROW_COLUMNS = 16
"""Two cache lines; the last column is not used."""

TOKENS, ORDER, FENCES, NUM_TOKENS, NUM_FENCES = range(5)
LIVE_TEXT, BUCKETS, NUM_BUCKETS, LIVE_SIZE, PROMPT_LEFT, NUM_LIVE = range(5, 11)
RESPONSES, NUM_RESPONSES = 11, 12
"""Columns of a group: addresses and sizes of its segment (0 tokens: none) and of its living text. PROMPT_LEFT: prompt
tokens that the living text still lacks. NUM_LIVE: its tokens. RESPONSES: start of each response of the segment, then
the origin of each."""
NUM_GROUP_COLUMNS = 13

MAX_PLACES = 8
"""Most places of a match in the history that vote together (`NUM_PLACES` in the ring)."""

REST_POINTS = 33
"""Grid points of a group's table of expected remaining tokens."""

NOWHERE, IN_HISTORY, IN_LIVE = range(3)
"""Texts that can contain a cursor."""

ROWS, EMITTED, PROPOSED, ACCEPTED, CROWDED = range(5)
PROPOSED_BY, ACCEPTED_BY, GAINED = 5, 9, 13
COUNTED, PREDICTED, SURVIVED = 14, 14 + NUM_BINS, 14 + 2 * NUM_BINS
SAVED = 14 + 3 * NUM_BINS
NUM_SUMS = SAVED + 1
"""Counters since the last report. CROWDED: living texts that have outgrown their buckets. GAINED: tokens accepted from
the ring, minus those that would have been accepted without it. SAVED: estimated seconds saved by drafts."""


class DraftState(NamedTuple):
    """Arrays of the drafter: S draft rows, G groups, C candidates, K tokens a draft."""

    rows: Longs
    """[S, NUM_ROW_COLUMNS]"""
    chains: TokenIds
    """[S, C, K]: last prediction of each candidate."""
    cells: TokenIds
    """[S, C, K]: cell of each of these tokens."""
    lengths: TokenIds
    """[S, C]: length of each chain."""
    anchors: Longs
    """[S, C]: position of each chain's first token in its text."""
    match_lengths: TokenIds
    """[S, C]: matching tokens of context."""
    origins: TokenIds
    """[S, C]: origin of each chain (`history.drafting.acceptance`)."""
    products: Floats
    """[S, K]: product of rates of the chosen chain."""
    survivals: Floats
    """[S, K]: corrected survival of the chosen chain."""
    groups: Longs
    """[G, NUM_GROUP_COLUMNS]"""
    remaining: Doubles
    """[G, REST_POINTS + 1]: expected remaining tokens of a response after 0, 1, .. grid steps; last, the grid step in
    tokens."""
    counts: Floats
    """[cells, 2]: accepted and all tokens."""
    rates: Floats
    """[cells]"""
    correction_sums: Floats
    """[NUM_CORRECTIONS, 2]"""
    corrections: Floats
    """[NUM_CORRECTIONS]"""
    origin_sums: Floats
    """[NUM_ORIGINS, 2]"""
    origin_scales: Floats
    """[NUM_ORIGINS]"""
    ring: TokenIds
    """[RING_TOKENS], see `history.drafting.recent_ring`."""
    ring_buckets: TokenIds
    """[RING_BUCKETS, NUM_PLACES]"""
    ring_end: Longs
    """[1]: end of the newest text."""
    uses_ring: Longs
    """[1]: whether this forward searches the ring."""
    ring_trials: Doubles
    """[4], see `history.drafting.ring_use`."""
    recent_survival: Doubles
    """[4], see `history.drafting.observed_survival`."""
    last_seconds: Doubles
    """[2]: estimated seconds of the forward under way without drafts (0: unknown), and with them."""
    threshold: Doubles
    """[1]: least survival of a draft token, without prices."""
    sums: Doubles
    """[NUM_SUMS]"""
    best_tokens: TokenIds
    """[R, K]: each batch row's best candidate; this and the following arrays hold one forward's results."""
    best_survivals: Floats
    """[R, K]: probability that a token and all before it are accepted."""
    available: TokenIds
    """[R]: tokens of each best candidate, at most K."""
    drafted: TokenIds
    """[R K]: all drafts, joined."""
    ends: Longs
    """[R + 1]: 0, then the end of each row's draft in `drafted`."""
    places: TokenIds
    """[NUM_PLACES]; this and the following arrays are scratch memory."""
    votes: TokenIds
    """[C, K, 2]: places that agree with a chain's token, and places asked."""
    kinds: Longs
    """[C]: recent misses or shift of the cursor, used as its agreement bin."""
    leads: Longs
    """[C]: leading tokens of each chain that were emitted."""
    common: Longs
    """[C, C]: common prefix of two chains; -1 if either is empty."""
    candidate_products: Floats
    """[C, K]"""


_NUM_SIZES = 5


def table_of(state: DraftState) -> Longs:
    """The table of a state, which kernels take in its place: five sizes, then the address of each array.

    numba unpacks every array at every call of a kernel, so one table costs less. It is made anew whenever an array is
    replaced. The caller keeps the arrays alive.
    """
    addresses = [array.__array_interface__["data"][0] for array in state]
    most = state.products.shape[1]
    sizes = len(state.rows), len(state.groups), len(state.counts), most, len(state.available)
    return np.array([*sizes, *addresses], dtype=np.int64)


@kernel
def state_at(table: Longs) -> DraftState:
    """View the state of a table, without reference counts. Only for kernels."""
    rows, groups, cells, most, batch = table[0], table[1], table[2], table[3], table[4]
    at = table[_NUM_SIZES:]
    return DraftState(
        rows=int64s_at(at[0], (rows, NUM_ROW_COLUMNS)),
        chains=int32s_at(at[1], (rows, NUM_CANDIDATES, most)),
        cells=int32s_at(at[2], (rows, NUM_CANDIDATES, most)),
        lengths=int32s_at(at[3], (rows, NUM_CANDIDATES)),
        anchors=int64s_at(at[4], (rows, NUM_CANDIDATES)),
        match_lengths=int32s_at(at[5], (rows, NUM_CANDIDATES)),
        origins=int32s_at(at[6], (rows, NUM_CANDIDATES)),
        products=float32s_at(at[7], (rows, most)),
        survivals=float32s_at(at[8], (rows, most)),
        groups=int64s_at(at[9], (groups, NUM_GROUP_COLUMNS)),
        remaining=float64s_at(at[10], (groups, REST_POINTS + 1)),
        counts=float32s_at(at[11], (cells, 2)),
        rates=float32s_at(at[12], cells),
        correction_sums=float32s_at(at[13], (NUM_CORRECTIONS, 2)),
        corrections=float32s_at(at[14], NUM_CORRECTIONS),
        origin_sums=float32s_at(at[15], (NUM_ORIGINS, 2)),
        origin_scales=float32s_at(at[16], NUM_ORIGINS),
        ring=int32s_at(at[17], RING_TOKENS),
        ring_buckets=int32s_at(at[18], (RING_BUCKETS, NUM_PLACES)),
        ring_end=int64s_at(at[19], 1),
        uses_ring=int64s_at(at[20], 1),
        ring_trials=float64s_at(at[21], 4),
        recent_survival=float64s_at(at[22], 4),
        last_seconds=float64s_at(at[23], 2),
        threshold=float64s_at(at[24], 1),
        sums=float64s_at(at[25], NUM_SUMS),
        best_tokens=int32s_at(at[26], (batch, most)),
        best_survivals=float32s_at(at[27], (batch, most)),
        available=int32s_at(at[28], batch),
        drafted=int32s_at(at[29], batch * most),
        ends=int64s_at(at[30], batch + 1),
        places=int32s_at(at[31], NUM_PLACES),
        votes=int32s_at(at[32], (NUM_CANDIDATES, most, 2)),
        kinds=int64s_at(at[33], NUM_CANDIDATES),
        leads=int64s_at(at[34], NUM_CANDIDATES),
        common=int64s_at(at[35], (NUM_CANDIDATES, NUM_CANDIDATES)),
        candidate_products=float32s_at(at[36], (NUM_CANDIDATES, most)),
    )


def fresh_state(max_draft_tokens: int, threshold: float = 0.0) -> DraftState:
    """Make a state without draft rows or groups."""
    counts = fresh_counts()
    return DraftState(
        rows=np.zeros((0, NUM_ROW_COLUMNS), dtype=np.int64),
        chains=np.zeros((0, NUM_CANDIDATES, max_draft_tokens), dtype=np.int32),
        cells=np.zeros((0, NUM_CANDIDATES, max_draft_tokens), dtype=np.int32),
        lengths=np.zeros((0, NUM_CANDIDATES), dtype=np.int32),
        anchors=np.zeros((0, NUM_CANDIDATES), dtype=np.int64),
        match_lengths=np.zeros((0, NUM_CANDIDATES), dtype=np.int32),
        origins=np.zeros((0, NUM_CANDIDATES), dtype=np.int32),
        products=np.zeros((0, max_draft_tokens), dtype=np.float32),
        survivals=np.zeros((0, max_draft_tokens), dtype=np.float32),
        groups=np.zeros((0, NUM_GROUP_COLUMNS), dtype=np.int64),
        remaining=np.zeros((0, REST_POINTS + 1)),
        counts=counts,
        rates=counts[:, 0] / counts[:, 1],
        correction_sums=fresh_corrections(),
        corrections=np.zeros(NUM_CORRECTIONS, dtype=np.float32),
        origin_sums=np.zeros((NUM_ORIGINS, 2), dtype=np.float32),
        origin_scales=np.ones(NUM_ORIGINS, dtype=np.float32),
        ring=np.full(RING_TOKENS, SEPARATOR, dtype=np.int32),
        ring_buckets=np.full((RING_BUCKETS, NUM_PLACES), -1, dtype=np.int32),
        ring_end=np.zeros(1, dtype=np.int64),
        uses_ring=np.ones(1, dtype=np.int64),
        ring_trials=np.array([1.0, 0.0, 0.0, 0.0]),
        recent_survival=np.zeros(4),
        last_seconds=np.zeros(2),
        threshold=np.array([threshold]),
        sums=np.zeros(NUM_SUMS),
        best_tokens=np.zeros((0, max_draft_tokens), dtype=np.int32),
        best_survivals=np.zeros((0, max_draft_tokens), dtype=np.float32),
        available=np.zeros(0, dtype=np.int32),
        drafted=np.zeros(0, dtype=np.int32),
        ends=np.zeros(1, dtype=np.int64),
        **scratch_arrays(max_draft_tokens),
    )


def scratch_arrays(max_draft_tokens: int) -> dict[str, npt.NDArray[Any]]:
    """Make the scratch arrays of a state; they carry nothing from one row to the next."""
    return {
        "places": np.zeros(NUM_PLACES, dtype=np.int32),
        "votes": np.zeros((NUM_CANDIDATES, max_draft_tokens, 2), dtype=np.int32),
        "kinds": np.zeros(NUM_CANDIDATES, dtype=np.int64),
        "leads": np.zeros(NUM_CANDIDATES, dtype=np.int64),
        "common": np.full((NUM_CANDIDATES, NUM_CANDIDATES), -1, dtype=np.int64),
        "candidate_products": np.zeros((NUM_CANDIDATES, max_draft_tokens), dtype=np.float32),
    }


def with_rows(state: DraftState, num_rows: int) -> DraftState:
    """Extend the state by draft rows of zeros."""
    return state._replace(
        rows=_grown(state.rows, num_rows),
        chains=_grown(state.chains, num_rows),
        cells=_grown(state.cells, num_rows),
        lengths=_grown(state.lengths, num_rows),
        anchors=_grown(state.anchors, num_rows),
        match_lengths=_grown(state.match_lengths, num_rows),
        origins=_grown(state.origins, num_rows),
        products=_grown(state.products, num_rows),
        survivals=_grown(state.survivals, num_rows),
    )


def with_groups(state: DraftState, num_groups: int) -> DraftState:
    """Extend the state by groups of zeros."""
    return state._replace(groups=_grown(state.groups, num_groups), remaining=_grown(state.remaining, num_groups))


def with_batch(state: DraftState, num_rows: int) -> DraftState:
    """Extend the results of a forward to batches of `num_rows` rows."""
    return state._replace(
        best_tokens=_grown(state.best_tokens, num_rows),
        best_survivals=_grown(state.best_survivals, num_rows),
        available=_grown(state.available, num_rows),
        drafted=_grown(state.drafted, num_rows * state.best_tokens.shape[1]),
        ends=_grown(state.ends, num_rows + 1),
    )


def _grown(array: npt.NDArray[Scalar], size: int) -> npt.NDArray[Scalar]:
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), dtype=array.dtype)])
