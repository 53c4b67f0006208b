"""Finds draft candidates for every row of a batch, chooses the best, and estimates its survival. All compiled.

Rows are processed in several passes. Each pass prefetches the memory that the next pass reads: with many requests the
index is far larger than the caches, and cache misses would dominate the time.
"""

import numpy as np

from history.drafting.acceptance import (
    ELSEWHERE,
    LIVING,
    NUM_CANDIDATES,
    agreement_bin,
    cell,
    corrected,
    depth_bin,
    make_non_increasing,
    match_bin,
    origin_at,
    relation_bin,
    scaled,
)
from history.drafting.live_text import (
    BUCKET,
    BY_ONE_AND_THREE,
    BY_ONE_THREE_FIVE,
    BY_THREE,
    FIVE,
    bucket_of,
    bucket_of_five,
    newest_places,
)
from history.drafting.realign import realign
from history.drafting.recent_ring import NUM_PLACES
from history.drafting.state import (
    BUCKETS,
    CHOSEN,
    CURSOR,
    CURSOR_MATCH,
    CURSOR_TEXT,
    DRAFTED,
    FENCES,
    GROUP,
    HISTORY,
    IN_HISTORY,
    LIVE,
    LIVE_SIZE,
    LIVE_TEXT,
    LOST,
    MAX_PLACES,
    MOVED,
    NOWHERE,
    NUM_BUCKETS,
    NUM_FENCES,
    NUM_RESPONSES,
    NUM_TOKENS,
    ORDER,
    OTHERWISE,
    PROMPT_LENGTH,
    RESPONSES,
    RING,
    STICKY,
    TOKENS,
    DraftState,
    Floats,
    Longs,
    state_at,
)
from history.drafting.update import cursor_tokens
from history.index.search import WINDOW, best_places, context_fence, follow, narrowed, window
from history.index.suffix_array import descend, node_at, top_shift
from history.jit import CACHE_LINE, borrowed, int32s_at, int64s_at, kernel, prefetch
from history.types import TokenIds

_MIN_SURVIVAL = 0.02
"""Survival at which a candidate is cut."""


@kernel
def propose(
    table: Longs,
    draft_rows: Longs,
    token_ids: TokenIds,
    num_tokens: TokenIds,
    rooms: TokenIds,
    drafts: TokenIds,
    survivals: Floats,
    available: TokenIds,
) -> None:
    """Choose the best candidate of every row, from the state of `table` (`history.drafting.state.table_of`).

    Writes its tokens into `drafts` [R, K], their survival into `survivals` [R, K], and their number, at most rooms[i],
    into `available` [R].
    """
    state, token_ids = state_at(table), borrowed(token_ids)
    num_rows = len(draft_rows)
    begins = np.empty(num_rows, dtype=np.int64)
    ends = np.empty(num_rows, dtype=np.int64)
    buckets = np.empty(num_rows, dtype=np.int64)
    shared = np.full(num_rows, -1, dtype=np.int64)
    keys, firsts = _search(state, draft_rows, token_ids, num_tokens, rooms)
    for row in range(num_rows):
        available[row] = 0
        begins[row] = ends[row] = 0
        if draft_rows[row] >= 0:
            state.rows[draft_rows[row], CHOSEN] = -1
            state.rows[draft_rows[row], DRAFTED] = 0
        if draft_rows[row] >= 0 and rooms[row] > 0:
            begins[row], ends[row], buckets[row] = _locate_matches(
                state, draft_rows[row], token_ids[row], num_tokens[row], keys[row], firsts[row]
            )
            shared[row] = _locate_in_ring(state, draft_rows[row], token_ids[row], num_tokens[row])
    for row in range(num_rows):
        if draft_rows[row] >= 0 and rooms[row] > 0:
            begins[row], ends[row] = _narrow(
                state, draft_rows[row], token_ids[row], num_tokens[row], begins[row], ends[row], buckets[row]
            )
            if shared[row] >= 0:
                for i in range(NUM_PLACES):
                    position = max(state.ring_buckets[shared[row], i], 0)
                    prefetch(state.ring.ctypes.data + 4 * position)
    for row in range(num_rows):
        draft_row = draft_rows[row]
        if draft_row < 0 or rooms[row] <= 0:
            continue
        _find_candidates(state, draft_row, token_ids[row], num_tokens[row], begins[row], ends[row])
        chosen, otherwise = _choose_candidate(state, draft_row, rooms[row])
        if chosen < 0:
            continue
        state.rows[draft_row, CHOSEN], state.rows[draft_row, OTHERWISE] = chosen, otherwise
        available[row] = min(state.lengths[draft_row, chosen], rooms[row])
        for k in range(state.lengths[draft_row, chosen]):
            product = state.candidate_products[chosen, k]
            state.products[draft_row, k] = product
            survivals[row, k] = corrected(state.corrections, chosen, depth_bin(k), product)
            drafts[row, k] = state.chains[draft_row, chosen, k]
        make_non_increasing(survivals[row], state.lengths[draft_row, chosen])
        for k in range(state.lengths[draft_row, chosen]):
            state.survivals[draft_row, k] = survivals[row, k]


@kernel
def _search(
    state: DraftState, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds
) -> tuple[Longs, Longs]:
    """Search every row's segment for its newest context; return the context's fence and the number of smaller fences.

    All rows descend one level before any row descends the next, so that prefetches complete in time.
    """
    num_rows = len(draft_rows)
    keys, firsts = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    levels, shifts = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    num_searching = 0
    for row in range(num_rows):
        if draft_rows[row] >= 0 and rooms[row] > 0:
            columns, length = state.rows[draft_rows[row]], num_tokens[row]
            size = state.groups[columns[GROUP], NUM_TOKENS]
            if size > 0:
                keys[row] = context_fence(token_ids[row], length - 1, length - columns[PROMPT_LENGTH])
                shifts[row] = top_shift(size)
                prefetch(state.groups[columns[GROUP], FENCES])
                num_searching += 1
    while num_searching > 0:
        num_searching = 0
        for row in range(num_rows):
            if shifts[row] > 0:
                group = state.groups[state.rows[draft_rows[row], GROUP]]
                fences = int64s_at(group[FENCES], group[NUM_FENCES])
                levels[row], firsts[row], shifts[row] = descend(
                    fences, group[NUM_TOKENS], keys[row], levels[row], firsts[row], shifts[row]
                )
                prefetch(group[FENCES] + 8 * node_at(levels[row], firsts[row]))
                num_searching += shifts[row] > 0
    return keys, firsts


@kernel
def _locate_matches(
    state: DraftState, draft_row: int, text: TokenIds, length: int, key: int, first: int
) -> tuple[int, int, int]:
    """Locate and prefetch the range of the segment's order and the bucket of the living text (-1: none)."""
    group = state.rows[draft_row, GROUP]
    limit = length - state.rows[draft_row, PROMPT_LENGTH]
    begin, end, bucket = 0, 0, -1
    size = state.groups[group, NUM_TOKENS]
    if size > 0:
        fences = int64s_at(state.groups[group, FENCES], state.groups[group, NUM_FENCES])
        begin, end = window(fences, size, key, first)
        prefetch(state.groups[group, RESPONSES])
        address = state.groups[group, ORDER]
        for line in range(address + 4 * begin, address + 4 * min(end, begin + WINDOW), CACHE_LINE):
            prefetch(line)
    if limit > 0:
        bucket = bucket_of(state.groups[group, NUM_BUCKETS], text, length - 1, limit)
        prefetch(state.groups[group, BUCKETS] + 4 * BUCKET * bucket)
    return begin, end, bucket


@kernel
def _locate_in_ring(state: DraftState, draft_row: int, text: TokenIds, length: int) -> int:
    """Locate and prefetch the first bucket of the ring to search (-1: none)."""
    limit = length - state.rows[draft_row, PROMPT_LENGTH]
    if limit <= 0 or state.uses_ring[0] == 0:
        return -1
    if limit >= FIVE:
        bucket = bucket_of_five(len(state.ring_buckets), text, length - 1)
    else:
        bucket = bucket_of(len(state.ring_buckets), text, length - 1, limit)
    for line in range(0, 4 * NUM_PLACES, CACHE_LINE):
        prefetch(state.ring_buckets.ctypes.data + 4 * NUM_PLACES * bucket + line)
    return bucket


@kernel
def _narrow(
    state: DraftState, draft_row: int, text: TokenIds, length: int, begin: int, end: int, bucket: int
) -> tuple[int, int]:
    """Narrow a long range, and prefetch the texts to compare."""
    group = state.rows[draft_row, GROUP]
    if end > begin:
        address, size = state.groups[group, TOKENS], state.groups[group, NUM_TOKENS]
        order = int32s_at(state.groups[group, ORDER], size)
        if end - begin > WINDOW:
            limit = length - state.rows[draft_row, PROMPT_LENGTH]
            begin, end = narrowed(int32s_at(address, size), order, begin, end, text, length - 1, limit)
        for i in range(begin, end):
            prefetch(address + 4 * order[i])
    if bucket >= 0:
        positions = int32s_at(state.groups[group, BUCKETS] + 4 * BUCKET * bucket, BUCKET)
        for i in range(BUCKET):
            prefetch(state.groups[group, LIVE_TEXT] + 4 * max(positions[i], 0))
    if state.rows[draft_row, CURSOR_TEXT] != NOWHERE:
        column = TOKENS if state.rows[draft_row, CURSOR_TEXT] == IN_HISTORY else LIVE_TEXT
        prefetch(state.groups[group, column] + 4 * state.rows[draft_row, CURSOR])
    return begin, end


@kernel
def _find_candidates(
    state: DraftState,
    draft_row: int,
    text: TokenIds,
    length: int,
    begin: int,
    end: int,
) -> None:
    """Follow all candidates: chains, lengths, anchors and match lengths of the row, votes and kinds."""
    places, kinds = state.places, state.kinds
    columns, group = state.rows[draft_row], state.groups[state.rows[draft_row, GROUP]]
    last, limit = length - 1, length - columns[PROMPT_LENGTH]
    live = int32s_at(group[LIVE_TEXT], group[LIVE_SIZE])
    cursor, cursor_text, lost = columns[CURSOR], columns[CURSOR_TEXT], columns[LOST]
    for candidate in range(NUM_CANDIDATES):
        tokens, count, match_length = live, 0, 0
        if candidate == HISTORY:
            if end > begin:
                tokens = int32s_at(group[TOKENS], group[NUM_TOKENS])
                order = int32s_at(group[ORDER], group[NUM_TOKENS])
                few = places[:MAX_PLACES]
                count, match_length = best_places(tokens, order, begin, end, text, last, limit, few)
        elif candidate == LIVE:
            if limit > 0:
                buckets = int32s_at(group[BUCKETS], group[NUM_BUCKETS] * BUCKET).reshape((-1, BUCKET))
                contexts = BY_ONE_AND_THREE if group[NUM_TOKENS] == 0 else BY_THREE
                count, match_length = newest_places(live, buckets, text, last, limit, contexts, places)
        elif candidate == RING:
            if limit > 0 and state.uses_ring[0]:
                tokens, buckets = state.ring, state.ring_buckets
                count, match_length = newest_places(tokens, buckets, text, last, limit, BY_ONE_THREE_FIVE, places)
        elif cursor_text != NOWHERE:
            tokens = cursor_tokens(state, draft_row)
            match_length, places[0] = columns[CURSOR_MATCH], cursor
            if candidate == STICKY:
                count = 0 if lost == 0 and _is_followed(state, draft_row, cursor_text, cursor) else 1
                kinds[STICKY] = lost if lost <= 2 else (3 if lost <= 4 else 4)
            elif lost > 0:
                shift, equal = realign(tokens, cursor, text, last, limit)
                count, places[0] = (1 if equal > 0 else 0), cursor + shift
                kinds[MOVED] = min(equal, 4) - 1 + (4 if shift < 0 else 0)
        state.match_lengths[draft_row, candidate] = match_length
        state.lengths[draft_row, candidate] = 0
        if count > 0:
            state.lengths[draft_row, candidate], state.anchors[draft_row, candidate] = follow(
                tokens, places, count, state.chains[draft_row, candidate], state.votes[candidate]
            )


@kernel
def _is_followed(state: DraftState, draft_row: int, text: int, cursor: int) -> bool:
    """Check whether another candidate already continues at the cursor."""
    candidate = HISTORY if text == IN_HISTORY else LIVE
    return bool(state.lengths[draft_row, candidate] > 0 and state.anchors[draft_row, candidate] == cursor)


@kernel
def _choose_candidate(state: DraftState, draft_row: int, room: int) -> tuple[int, int]:
    """Multiply rates along every candidate; return the best candidate, and the best without the ring (-1: none)."""
    votes, common, others = state.votes, state.common, state.leads
    best, chosen, best_otherwise, otherwise = 0.0, -1, 0.0, -1
    for candidate in range(NUM_CANDIDATES):
        for other in range(candidate):
            common[candidate, other] = common[other, candidate] = _num_common(state, draft_row, candidate, other)
    for candidate in range(NUM_CANDIDATES):
        length = state.lengths[draft_row, candidate]
        if length == 0:
            continue
        num_others = 0
        for other in range(NUM_CANDIDATES):
            if common[candidate, other] >= 0:
                others[num_others] = common[candidate, other]
                num_others += 1
        match = match_bin(state.match_lengths[draft_row, candidate])
        origin = _origin(state, draft_row, candidate)
        state.origins[draft_row, candidate] = origin
        expected, product, scale = 0.0, 1.0, state.origin_scales[origin]
        for k in range(length):
            num_same = 0
            for other in range(num_others):
                num_same += others[other] > k
            agreement = state.kinds[candidate]
            if candidate < STICKY:
                agreement = agreement_bin(votes[candidate, k, 0], votes[candidate, k, 1])
            where = cell(candidate, match, agreement, depth_bin(k), relation_bin(num_same, num_others - num_same))
            state.cells[draft_row, candidate, k] = where
            product *= scaled(state.rates[where], scale)
            state.candidate_products[candidate, k] = product
            if k < room:
                expected += product
            if product < _MIN_SURVIVAL:
                state.lengths[draft_row, candidate] = k + 1
                break
        if expected > best:
            best, chosen = expected, candidate
        if expected > best_otherwise and candidate != RING:
            best_otherwise, otherwise = expected, candidate
    return chosen, otherwise


@kernel
def _origin(state: DraftState, draft_row: int, candidate: int) -> int:
    """Return the origin of a candidate's chain."""
    text = state.rows[draft_row, CURSOR_TEXT]
    if candidate == RING:
        return ELSEWHERE
    if candidate == LIVE or (candidate >= STICKY and text != IN_HISTORY):
        return LIVING
    group = state.rows[draft_row, GROUP]
    responses = int32s_at(state.groups[group, RESPONSES], 2 * state.groups[group, NUM_RESPONSES])
    return origin_at(responses, state.anchors[draft_row, candidate])


@kernel
def _num_common(state: DraftState, draft_row: int, candidate: int, other: int) -> int:
    """Length of the common prefix of two candidates; -1 if either is empty."""
    most = min(state.lengths[draft_row, candidate], state.lengths[draft_row, other])
    if most == 0:
        return -1
    k = 0
    while k < most and state.chains[draft_row, candidate, k] == state.chains[draft_row, other, k]:
        k += 1
    return k
