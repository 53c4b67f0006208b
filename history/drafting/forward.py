"""All steps of drafting for one forward, in one kernel.

A call of a kernel from Python costs about a microsecond, and so does work on a few numbers in Python. In a small batch
the steps themselves take less. So the steps are one kernel, and a caller names those that it wants: a batch that is
split among threads has one call for the steps before, one for each part, and one for the steps after.
"""

from history.drafting.candidates import propose
from history.drafting.draft_length import (
    break_even,
    choose_draft_lengths,
    expected_remaining,
    lengths_above,
    makespan_weights,
)
from history.drafting.observed_survival import scale_to_observed_survival
from history.drafting.ring_use import decide_ring_use
from history.drafting.state import (
    ACCEPTED,
    CROWDED,
    DRAFTED,
    EMITTED,
    GAINED,
    ROWS,
    SAVED,
    Doubles,
    DraftState,
    Longs,
    state_at,
)
from history.drafting.update import count_emitted, update_state
from history.jit import kernel
from history.types import TokenIds

COUNT, UPDATE, SEARCH, CHOOSE, RING_TRIAL = 1, 2, 4, 8, 16
"""Steps, as bits. COUNT: count the emitted tokens. UPDATE: learn from them. SEARCH: find each row's best candidate.
CHOOSE: choose draft lengths and join the drafts. RING_TRIAL: search the ring in any case."""
ALL = COUNT | UPDATE | SEARCH | CHOOSE

CANNOT_PAY, IS_CROWDED = -1, -2
"""Results of a call that stopped. CANNOT_PAY: no draft pays at these prices; nothing was learned. IS_CROWDED: after
UPDATE, a living text has outgrown its buckets; SEARCH and CHOOSE remain."""

_MIN_WEIGHT, _MAX_WEIGHT = 0.5, 4.0
"""Bounds of a row's makespan weight."""


@kernel
def draft(
    table: Longs,
    draft_rows: Longs,
    token_ids: TokenIds,
    num_tokens: TokenIds,
    rooms: TokenIds,
    seconds: Doubles,
    steps: int,
    begin: int,
    end: int,
) -> int:
    """Run these steps for R rows, and return the number of drafted tokens (0 without CHOOSE), or why the call stopped.

    The drafts are in `drafted` and `ends` of the state.

    Args:
        table: of the state (`history.drafting.state.table_of`).
        draft_rows: [R], -1 for a row without drafts.
        token_ids: [B, L], B at least R: texts of prompt and output.
        num_tokens: [R], tokens of each text, the newest included.
        rooms: [R], most tokens to draft for each row.
        seconds: [E + 1], prices (`history.drafting.draft_length`); empty: draft while survival reaches the threshold.
        steps: bits.
        begin: first row of SEARCH; the other steps take all rows.
        end: end of these rows.
    """
    state = state_at(table)
    sums = state.sums
    if steps & COUNT:
        _count(state, draft_rows, num_tokens)
        if len(seconds) > 0 and break_even(seconds, len(draft_rows)) >= 1:
            return CANNOT_PAY
    if steps & UPDATE:
        num_gained, num_accepted = sums[GAINED], sums[ACCEPTED]
        update_state(table, draft_rows, token_ids, num_tokens)
        is_trial = steps & RING_TRIAL > 0
        num_gained, num_accepted = sums[GAINED] - num_gained, sums[ACCEPTED] - num_accepted
        decide_ring_use(state.uses_ring, state.ring_trials, num_gained, num_accepted, is_trial)
        if sums[CROWDED] > 0:
            return IS_CROWDED
    if steps & SEARCH:
        propose(
            table,
            draft_rows[begin:end],
            token_ids[begin:end],
            num_tokens[begin:end],
            rooms[begin:end],
            state.best_tokens[begin:end],
            state.best_survivals[begin:end],
            state.available[begin:end],
        )
    if steps & CHOOSE:
        return _choose(state, draft_rows, num_tokens, seconds)
    return 0


@kernel
def totals(rooms: TokenIds, num_tokens: TokenIds, max_draft_tokens: int) -> tuple[int, int]:
    """Most tokens that can be drafted in all, and tokens of all texts."""
    most, context = 0, 0
    for row in range(len(rooms)):
        most += min(rooms[row], max_draft_tokens)
        context += num_tokens[row]
    return max(most, 0), context


@kernel
def _count(state: DraftState, draft_rows: Longs, num_tokens: TokenIds) -> None:
    """Count the tokens that the last forward emitted, and the time saved over plain forwards of one token a row."""
    sums, last = state.sums, state.last_seconds
    num_rows, num_emitted = sums[ROWS], sums[EMITTED]
    count_emitted(state.rows, sums, draft_rows, num_tokens)
    if last[0] > 0 and sums[ROWS] > num_rows:
        sums[SAVED] += last[0] * (sums[EMITTED] - num_emitted) / (sums[ROWS] - num_rows) - last[1]
    last[0] = 0


@kernel
def _choose(state: DraftState, draft_rows: Longs, num_tokens: TokenIds, seconds: Doubles) -> int:
    """Choose the draft lengths of the best candidates; return the number of drafted tokens."""
    survivals, available = state.best_survivals[: len(draft_rows)], state.available[: len(draft_rows)]
    scale_to_observed_survival(state.recent_survival, state.sums, survivals, available)
    if len(seconds) == 0:
        lengths = lengths_above(survivals, available, state.threshold[0])
    else:
        remaining = expected_remaining(state.rows, state.remaining, draft_rows, num_tokens)
        weights = makespan_weights(remaining, _MIN_WEIGHT, _MAX_WEIGHT)
        lengths = choose_draft_lengths(survivals, available, weights, seconds)
    num_drafted = _record_drafts(state, draft_rows, lengths)
    if len(seconds) > 0:
        state.last_seconds[0], state.last_seconds[1] = seconds[0], seconds[num_drafted]
    return num_drafted


@kernel
def _record_drafts(state: DraftState, draft_rows: Longs, lengths: TokenIds) -> int:
    """Record each row's draft length, join the drafts, and return the number of their tokens."""
    end = 0
    for row in range(len(draft_rows)):
        for k in range(lengths[row]):
            state.drafted[end + k] = state.best_tokens[row, k]
        end += lengths[row]
        state.ends[row + 1] = end
        if draft_rows[row] >= 0:
            state.rows[draft_rows[row], DRAFTED] = lengths[row]
    return end
