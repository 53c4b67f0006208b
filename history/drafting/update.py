"""Updates rates, cursors and living texts with the tokens emitted since the last forward. Compiled."""

from history.drafting.acceptance import (
    NUM_CANDIDATES,
    depth_bin,
    survival_bin,
    update_correction,
    update_origin,
    update_rate,
)
from history.drafting.live_text import BUCKET, BY_ONE_AND_THREE, BY_THREE, FIVE, append, bucket_of, bucket_of_five
from history.drafting.recent_ring import NUM_PLACES, append_running
from history.drafting.state import (
    ACCEPTED,
    ACCEPTED_BY,
    BUCKETS,
    CHOSEN,
    COUNTED,
    COUNTED_UP_TO,
    CROWDED,
    CURSOR,
    CURSOR_MATCH,
    CURSOR_TEXT,
    DRAFTED,
    EMITTED,
    GAINED,
    GROUP,
    HISTORY,
    IN_HISTORY,
    IN_LIVE,
    LIVE,
    LIVE_END,
    LIVE_SIZE,
    LIVE_STOP,
    LIVE_TEXT,
    LOST,
    MOVED,
    NOWHERE,
    NUM_BUCKETS,
    NUM_LIVE,
    NUM_TOKENS,
    OTHERWISE,
    PREDICTED,
    PROMPT_LEFT,
    PROMPT_LENGTH,
    PROPOSED,
    PROPOSED_BY,
    RING,
    RING_END,
    RING_STOP,
    ROWS,
    SEEN,
    STICKY,
    SURVIVED,
    TOKENS,
    Doubles,
    DraftState,
    Longs,
    state_at,
)
from history.jit import CACHE_LINE, borrowed, int32s_at, kernel, prefetch
from history.types import TokenIds

_CURSOR_CANDIDATES = (STICKY, MOVED, HISTORY, LIVE)
"""Candidates that a cursor can follow; of equally long matches the first wins."""

_MAX_MISSED = 24
"""Mismatched tokens after which a cursor is dropped."""

_CELLS_AHEAD, _AHEAD, _GROUP_AHEAD, _ROW_AHEAD = 1, 2, 5, 8
"""Rows by which the memory of a row is prefetched ahead. The arrays that hold addresses come first."""

_MIN_MATCH = 3
"""Least matching tokens at which a match without correct tokens still sets the cursor."""


@kernel
def count_emitted(table: Longs, sums: Doubles, draft_rows: Longs, num_tokens: TokenIds) -> None:
    """Count rows and their tokens emitted since the last forward. A row's first forward, of its prompt, is not counted.

    The kernel takes two arrays of the state: passing all thirty would take longer than reading them.
    """
    for row in range(len(draft_rows)):
        if draft_rows[row] < 0:
            continue
        columns = table[draft_rows[row]]
        if 0 < columns[COUNTED_UP_TO] < num_tokens[row]:
            sums[ROWS] += 1
            sums[EMITTED] += num_tokens[row] - columns[COUNTED_UP_TO]
        columns[COUNTED_UP_TO] = num_tokens[row]


@kernel
def update_state(table: Longs, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds) -> None:
    """Update the state of `table` with every row's new tokens; each candidate token is counted once."""
    state, token_ids = state_at(table), borrowed(token_ids)
    for row in range(len(draft_rows)):
        draft_row = draft_rows[row]
        if row + _ROW_AHEAD < len(draft_rows) and draft_rows[row + _ROW_AHEAD] >= 0:
            _prefetch_row(
                state, draft_rows[row + _ROW_AHEAD], token_ids[row + _ROW_AHEAD], num_tokens[row + _ROW_AHEAD]
            )
        if row + _GROUP_AHEAD < len(draft_rows) and draft_rows[row + _GROUP_AHEAD] >= 0:
            _prefetch_group(state, draft_rows[row + _GROUP_AHEAD])
        if row + _AHEAD < len(draft_rows) and draft_rows[row + _AHEAD] >= 0:
            _prefetch_chains(state, draft_rows[row + _AHEAD], token_ids[row + _AHEAD], num_tokens[row + _AHEAD])
        if row + _CELLS_AHEAD < len(draft_rows) and draft_rows[row + _CELLS_AHEAD] >= 0:
            _prefetch_cells(state, draft_rows[row + _CELLS_AHEAD])
        if draft_row < 0:
            continue
        seen, length = state.rows[draft_row, SEEN], num_tokens[row]
        text = token_ids[row]
        if seen == 0:
            seen = state.rows[draft_row, PROMPT_LENGTH]
        elif length > seen:
            for candidate in range(NUM_CANDIDATES):
                state.leads[candidate] = _lead(state, draft_row, candidate, text, seen, length)
            _update_rates(state, draft_row, length - seen)
            _move_cursor(state, draft_row, text, seen, length)
        if length > seen:
            _extend_live(state, draft_row, text, seen, length)
            _extend_ring(state, draft_row, text, seen, length)
        state.rows[draft_row, SEEN] = length
        for candidate in range(NUM_CANDIDATES):
            state.lengths[draft_row, candidate] = 0


@kernel
def _prefetch_row(state: DraftState, draft_row: int, text: TokenIds, length: int) -> None:
    """Prefetch the end of a row's text, and the arrays that locate its other memory."""
    address = state.rows.ctypes.data + 8 * state.rows.shape[1] * draft_row
    prefetch(address)
    prefetch(address + CACHE_LINE)
    prefetch(state.lengths.ctypes.data + 4 * NUM_CANDIDATES * draft_row)
    prefetch(state.anchors.ctypes.data + 8 * NUM_CANDIDATES * draft_row)
    prefetch(state.match_lengths.ctypes.data + 4 * NUM_CANDIDATES * draft_row)
    prefetch(state.origins.ctypes.data + 4 * NUM_CANDIDATES * draft_row)
    prefetch(text.ctypes.data + 4 * (length - 1))
    prefetch(text.ctypes.data + 4 * (length - 1) - CACHE_LINE)


@kernel
def _prefetch_group(state: DraftState, draft_row: int) -> None:
    """Prefetch the request's group."""
    address = state.groups.ctypes.data + 8 * state.groups.shape[1] * state.rows[draft_row, GROUP]
    prefetch(address)
    prefetch(address + CACHE_LINE)


@kernel
def _prefetch_cells(state: DraftState, draft_row: int) -> None:
    """Prefetch the counts and rates of the row's cells."""
    for candidate in range(NUM_CANDIDATES):
        if state.lengths[draft_row, candidate] > 0:
            where = state.cells[draft_row, candidate, 0]
            # the cells of a chain's first four tokens lie in these lines if they differ in depth only
            prefetch(state.counts.ctypes.data + 8 * where)
            prefetch(state.counts.ctypes.data + 8 * where + CACHE_LINE)
            prefetch(state.counts.ctypes.data + 8 * where + 2 * CACHE_LINE)
            prefetch(state.rates.ctypes.data + 4 * where)
            prefetch(state.rates.ctypes.data + 4 * where + CACHE_LINE)


@kernel
def _prefetch_chains(state: DraftState, draft_row: int, text: TokenIds, length: int) -> None:
    """Prefetch the memory that `update_state` reads and writes for a row."""
    columns, num_tokens = state.rows[draft_row], state.chains.shape[2]
    for candidate in range(NUM_CANDIDATES):
        at = 4 * num_tokens * (NUM_CANDIDATES * draft_row + candidate)
        prefetch(state.chains.ctypes.data + at)
        prefetch(state.cells.ctypes.data + at)
    prefetch(state.products.ctypes.data + 4 * num_tokens * draft_row)
    prefetch(state.survivals.ctypes.data + 4 * num_tokens * draft_row)
    group, first = state.groups[columns[GROUP]], columns[PROMPT_LENGTH]
    prefetch(group[LIVE_TEXT] + 4 * columns[LIVE_END])
    if columns[CURSOR_TEXT] != NOWHERE:
        column = TOKENS if columns[CURSOR_TEXT] == IN_HISTORY else LIVE_TEXT
        prefetch(group[column] + 4 * columns[CURSOR])
    for i in range(max(columns[SEEN], first + 1), min(length, columns[SEEN] + num_tokens)):
        bucket = bucket_of(group[NUM_BUCKETS], text, i - 1, i - first)
        prefetch(group[BUCKETS] + 4 * BUCKET * bucket)
        if state.uses_ring[0]:
            _prefetch_ring_bucket(state, bucket_of(len(state.ring_buckets), text, i - 1, i - first))
            if i - first >= FIVE:
                _prefetch_ring_bucket(state, bucket_of_five(len(state.ring_buckets), text, i - 1))


@kernel
def _prefetch_ring_bucket(state: DraftState, bucket: int) -> None:
    for line in range(0, 4 * NUM_PLACES, CACHE_LINE):
        prefetch(state.ring_buckets.ctypes.data + 4 * NUM_PLACES * bucket + line)


@kernel
def _lead(state: DraftState, draft_row: int, candidate: int, text: TokenIds, start: int, stop: int) -> int:
    """Count the leading tokens of a candidate that were emitted as text[start:stop]."""
    lead, most = 0, min(state.lengths[draft_row, candidate], stop - start)
    while lead < most and state.chains[draft_row, candidate, lead] == text[start + lead]:
        lead += 1
    return lead


@kernel
def _update_rates(state: DraftState, draft_row: int, num_emitted: int) -> None:
    sums = state.sums
    for candidate in range(NUM_CANDIDATES):
        lead, rejection = state.leads[candidate], 0.0
        num_known = min(lead + 1, state.lengths[draft_row, candidate], num_emitted)
        for k in range(num_known):
            where = state.cells[draft_row, candidate, k]
            rejection += 1.0 - state.rates[where]
            update_rate(state.counts, state.rates, where, k < lead)
        if num_known > 0:
            origin = state.origins[draft_row, candidate]
            update_origin(state.origin_sums, state.origin_scales, origin, rejection, num_known > lead)
    chosen, drafted = state.rows[draft_row, CHOSEN], state.rows[draft_row, DRAFTED]
    if chosen < 0:
        return
    lead = state.leads[chosen]
    # The token after the drafted ones is known as well. Later tokens are known only after a wrong one: a biased sample.
    known = min(state.lengths[draft_row, chosen], drafted + 1)
    for k in range(known if lead < num_emitted else min(known, lead)):
        product, survival, survived = state.products[draft_row, k], state.survivals[draft_row, k], k < lead
        update_correction(state.correction_sums, state.corrections, chosen, depth_bin(k), product, survived)
        where = survival_bin(survival)
        sums[COUNTED + where] += 1
        sums[PREDICTED + where] += survival
        sums[SURVIVED + where] += survived
    source, accepted = min(chosen, STICKY), min(lead, drafted)
    sums[PROPOSED] += drafted
    sums[ACCEPTED] += accepted
    sums[PROPOSED_BY + source] += drafted
    sums[ACCEPTED_BY + source] += accepted
    if chosen == RING:
        otherwise = state.rows[draft_row, OTHERWISE]
        sums[GAINED] += accepted - (min(state.leads[otherwise], drafted) if otherwise >= 0 else 0)


@kernel
def _move_cursor(state: DraftState, draft_row: int, text: TokenIds, start: int, stop: int) -> None:
    """Move the cursor to the candidate with most correct tokens, then over the tokens beyond it."""
    columns = state.rows[draft_row]
    best, lead = -1, 0
    for candidate in _CURSOR_CANDIDATES:
        if state.leads[candidate] > lead:
            best, lead = candidate, state.leads[candidate]
    if best < 0 and columns[CURSOR_TEXT] == NOWHERE:
        for candidate in (HISTORY, LIVE):
            if (
                best < 0
                and state.lengths[draft_row, candidate] > 0
                and state.match_lengths[draft_row, candidate] >= _MIN_MATCH
            ):
                best = candidate
    if best >= 0:
        if best == HISTORY:
            columns[CURSOR_TEXT] = IN_HISTORY
        elif best == LIVE:
            columns[CURSOR_TEXT] = IN_LIVE
        if best != STICKY or columns[LOST] > 0:
            columns[CURSOR_MATCH] = state.match_lengths[draft_row, best]
        columns[CURSOR] = state.anchors[draft_row, best] + lead
        columns[CURSOR_MATCH] += lead
        if lead > 0:
            columns[LOST] = 0
    if columns[CURSOR_TEXT] == NOWHERE:
        return
    tokens = cursor_tokens(state, draft_row)
    for i in range(start + lead, stop):
        expected = tokens[columns[CURSOR]]
        if expected == text[i]:
            columns[CURSOR_MATCH] = columns[CURSOR_MATCH] + 1 if columns[LOST] == 0 else 1
            columns[LOST] = 0
        else:
            columns[LOST] += 1
        columns[CURSOR] += expected >= 0
    if columns[LOST] >= _MAX_MISSED:
        columns[CURSOR_TEXT] = NOWHERE


@kernel
def cursor_tokens(state: DraftState, draft_row: int) -> TokenIds:
    """Return the text that contains the row's cursor."""
    group = state.rows[draft_row, GROUP]
    if state.rows[draft_row, CURSOR_TEXT] == IN_HISTORY:
        return int32s_at(state.groups[group, TOKENS], state.groups[group, NUM_TOKENS])
    return int32s_at(state.groups[group, LIVE_TEXT], state.groups[group, LIVE_SIZE])


@kernel
def _extend_live(state: DraftState, draft_row: int, text: TokenIds, start: int, stop: int) -> None:
    columns, group = state.rows[draft_row], state.groups[state.rows[draft_row, GROUP]]
    live = int32s_at(group[LIVE_TEXT], group[LIVE_SIZE])
    buckets = int32s_at(group[BUCKETS], group[NUM_BUCKETS] * BUCKET).reshape((-1, BUCKET))
    contexts = BY_ONE_AND_THREE if group[NUM_TOKENS] == 0 else BY_THREE
    if group[PROMPT_LEFT] > 0:
        append(live, buckets, 1, text, 0, min(group[PROMPT_LEFT], columns[PROMPT_LENGTH]), contexts)
        group[NUM_LIVE] += group[PROMPT_LEFT]
        group[PROMPT_LEFT] = 0
    stop = min(stop, start + columns[LIVE_STOP] - columns[LIVE_END])
    columns[LIVE_END] = append(live, buckets, columns[LIVE_END], text, start, stop, contexts)
    group[NUM_LIVE] += max(stop - start, 0)
    if group[NUM_LIVE] > 2 * group[NUM_BUCKETS]:
        state.sums[CROWDED] += 1


@kernel
def _extend_ring(state: DraftState, draft_row: int, text: TokenIds, start: int, stop: int) -> None:
    columns = state.rows[draft_row]
    if not state.uses_ring[0]:
        columns[RING_STOP] = columns[RING_END]  # later tokens would not follow the written ones
        return
    columns[RING_END], columns[RING_STOP] = append_running(
        state.ring,
        state.ring_buckets,
        state.ring_end,
        text,
        columns[PROMPT_LENGTH],
        start,
        stop,
        columns[RING_END],
        columns[RING_STOP],
    )
