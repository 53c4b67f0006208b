"""Drafts tokens for a batch of requests from their prompts' history, as far as verification pays.

Nothing here is remote, and no Python runs per token. If a segment is missing or damaged, its prompt is drafted without
history, and the drafter looks for the segment again later. If drafts cannot pay, or the batch has no candidates, the
drafter rests at almost no cost and tries again later.
"""

import logging
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from history.drafting.acceptance import NUM_BINS
from history.drafting.draft_length import (
    break_even,
    choose_draft_lengths,
    expected_remaining,
    lengths_above,
    makespan_weights,
)
from history.drafting.forward_cost import ForwardCostModel
from history.drafting.observed_survival import scale_to_observed_survival
from history.drafting.parallel import DraftRequests, DraftThreads
from history.drafting.prompt_group import DraftGroup
from history.drafting.recent_ring import REGION, append_finished
from history.drafting.state import (
    ACCEPTED,
    ACCEPTED_BY,
    CHOSEN,
    COUNTED,
    CROWDED,
    DRAFTED,
    EMITTED,
    GAINED,
    GROUP,
    LIVE_END,
    LIVE_STOP,
    NUM_BUCKETS,
    NUM_LIVE,
    PREDICTED,
    PROMPT_LEFT,
    PROMPT_LENGTH,
    PROPOSED,
    PROPOSED_BY,
    RING_END,
    RING_STOP,
    ROWS,
    SURVIVED,
    Doubles,
    DraftState,
    Longs,
    fresh_state,
    table_of,
    with_groups,
    with_rows,
)
from history.drafting.stats import DraftStats
from history.drafting.update import count_emitted, update_state
from history.index.segment import SegmentError
from history.jit import kernel
from history.types import TokenIds

_log = logging.getLogger(__name__)

_RETRY_SEGMENTS_EVERY = 64
"""Forwards between two attempts to attach missing or damaged segments."""
_ROWS_ADDED = 64
"""Draft rows, and groups, added at a time."""
_MIN_WEIGHT, _MAX_WEIGHT = 0.5, 4.0
"""Bounds of a row's makespan weight."""
_MAX_USELESS = 8
"""Consecutive forwards without drafts after which the drafter rests."""
_MAX_REST = 16
_RING_TRIALS, _RING_TRIAL_EVERY = 32, 16
"""Forwards with ring search before its gain is evaluated; interval of forwards that search while it does not pay."""
_FEW_RING_TRIALS, _ENOUGH_ACCEPTED = 8, 4000
"""Forwards and accepted tokens before the evaluation in a large batch. Fewer may misjudge: see decision 19."""
_MIN_RING_GAIN = 0.05
"""Least share of accepted tokens that the ring must add. A search takes about a millisecond for 256 rows, a twentieth
of a forward of 20 ms."""
_NOTICEABLE = 0.005
"""Share of a forward above which the drafter's own time is worth saving."""


class Drafter:
    """Drafts tokens in one engine process. `open`, `close`, `propose` and `drain` mutate; not thread-safe."""

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        segments_dir: str = "",
        cost_model: ForwardCostModel | None = None,
        threshold: float = 0.1,
        max_model_len: int = 1 << 30,
        num_threads: int = 1,
    ) -> None:
        """Prepare to draft.

        Args:
            max_draft_tokens: most tokens of one draft.
            segments_dir: folder of the prompts' segments; empty: no history.
            cost_model: prices of forwards, which set draft lengths; None: draft while survival reaches `threshold`.
            threshold: least survival probability of a draft token, without a cost model.
            max_model_len: most tokens of a text.
            num_threads: threads that draft large batches (`history.drafting.parallel`).
        """
        self._max_draft_tokens = max_draft_tokens
        self._directory = Path(segments_dir) if segments_dir else None
        self._cost_model = cost_model
        self._threshold = threshold
        self._max_model_len = max_model_len
        self._set_state(fresh_state(max_draft_tokens))
        self._threads = DraftThreads(num_threads, max_draft_tokens=max_draft_tokens)
        self._groups: dict[int, tuple[int, DraftGroup]] = {}
        self._open_rows: dict[int, tuple[int, DraftGroup]] = {}
        self._free_groups: list[int] = []
        self._free_rows: list[int] = []
        self._num_useless, self._num_resting = 0, 0
        self._uses_ring, self._num_ring_trials = True, 0
        self._num_ring_gained, self._num_accepted = 0.0, 0.0
        self._last_seconds: tuple[float, float] | None = None
        """Estimated seconds of the forward under way: without drafts, and with them."""
        self._num_forwards, self._num_requests, self._num_hits, self._num_damaged = 0, 0, 0, 0
        self._propose_s, self._saved_s = 0.0, 0.0
        self._recent_survival = np.zeros(4)
        """Expected and observed survivors: of `DraftState.sums` at the last forward, then their decayed sums."""

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int, step: int = 0) -> int:
        """Add a request and return its draft row.

        Args:
            prompt_key: key of the prompt; requests of one prompt share history and living text.
            prompt_length: tokens of the prompt.
            max_length: tokens of the prompt and of the longest response.
            step: current step, from which the age of a past response is computed.
        """
        if prompt_key not in self._groups:
            most = min(max_length, self._max_model_len) - prompt_length
            self._add_group(prompt_key, prompt_length, max(most, 0) + 2, step)
        index, group = self._groups[prompt_key]
        if not self._free_rows:
            size = len(self._state.rows)
            self._set_state(with_rows(self._state, size + _ROWS_ADDED))
            self._free_rows = list(reversed(range(size, size + _ROWS_ADDED)))
        draft_row = self._free_rows.pop()
        self._open_rows[draft_row] = index, group
        group.num_open += 1
        row = self._state.rows[draft_row]
        row[:] = 0
        row[PROMPT_LENGTH], row[GROUP], row[CHOSEN] = prompt_length, index, -1
        row[LIVE_END], row[LIVE_STOP] = group.add_region()
        group.write(self._state.groups[index])
        self._state.lengths[draft_row] = 0
        self._num_requests += 1
        self._num_hits += group.segment is not None
        return draft_row

    def close(self, draft_row: int) -> None:
        """Remove a request. The last request of a prompt also frees the living text and the segment."""
        index, group = self._open_rows.pop(draft_row)
        self._free_rows.append(draft_row)
        row = self._state.rows[draft_row]
        start, end = int(row[LIVE_STOP]) - group.room, int(row[LIVE_END])
        if row[RING_END] == row[RING_STOP] or end - start > REGION:
            append_finished(self._state.ring, self._state.ring_buckets, self._state.ring_end, group.text, start, end)
        group.num_open -= 1
        if group.num_open == 0:
            del self._groups[group.prompt_key]
            self._state.groups[index] = 0
            self._free_groups.append(index)

    def propose(self, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Draft tokens for each row of a batch.

        Args:
            draft_rows: [R], -1 for a row without drafts.
            token_ids: [B, L], B at least R: texts of prompt and output.
            num_tokens: [R], tokens of each text, the newest included.
            rooms: [R], most tokens to draft for each row.
        """
        began = time.perf_counter()
        requests = DraftRequests.of(draft_rows, token_ids, num_tokens, rooms)
        self._num_forwards += 1
        if self._num_forwards % _RETRY_SEGMENTS_EVERY == 0:
            self._retry_segments()
        self._count(requests)
        seconds = None
        if self._cost_model is not None:
            num_rows = len(requests)
            most, context = _totals(requests.rooms, requests.num_tokens, self._max_draft_tokens)
            seconds = self._cost_model.seconds_by_tokens(num_rows, num_rows + max(most, 0), context)
            if self._num_resting or break_even(seconds, num_rows) >= 1:
                return self._rest(num_rows, began)
        drafts = self._draft(requests, seconds)
        spent = time.perf_counter() - began
        self._propose_s += spent
        if seconds is not None:
            self._back_off(any(drafts), spent / seconds[0])
        return drafts

    def drain(self) -> DraftStats:
        """Return the counters since the last call, and reset them."""
        sums = self._state.sums
        stats = DraftStats(
            num_forwards=self._num_forwards,
            num_rows=int(sums[ROWS]),
            num_emitted=int(sums[EMITTED]),
            num_drafted=int(sums[PROPOSED]),
            num_accepted=int(sums[ACCEPTED]),
            drafted_by_source=tuple(int(x) for x in sums[PROPOSED_BY:ACCEPTED_BY]),
            accepted_by_source=tuple(int(x) for x in sums[ACCEPTED_BY:GAINED]),
            calibration_count=tuple(int(x) for x in sums[COUNTED:PREDICTED]),
            calibration_predicted=tuple(sums[PREDICTED:SURVIVED].tolist()),
            calibration_survived=tuple(int(x) for x in sums[SURVIVED : SURVIVED + NUM_BINS]),
            num_requests=self._num_requests,
            num_hits=self._num_hits,
            num_damaged=self._num_damaged,
            propose_s=self._propose_s,
            saved_s=float(self._saved_s),
        )
        sums[:] = 0
        self._recent_survival[:2] = 0
        self._num_forwards, self._num_requests, self._num_hits, self._num_damaged = 0, 0, 0, 0
        self._propose_s, self._saved_s = 0.0, 0.0
        return stats

    def _draft(self, requests: DraftRequests, seconds: Doubles | None) -> list[list[int]]:
        state, sums = self._state, self._state.sums
        num_gained, num_accepted = sums[GAINED], sums[ACCEPTED]
        update_state(self._table, requests.draft_rows, requests.token_ids, requests.num_tokens)
        self._decide_ring_use(sums[GAINED] - num_gained, sums[ACCEPTED] - num_accepted)
        if sums[CROWDED]:
            self._rehash()
        best = self._threads.propose(state, self._table, requests)
        scale_to_observed_survival(self._recent_survival, sums, best.survivals, best.available)
        if seconds is None:
            lengths = lengths_above(best.survivals, best.available, self._threshold)
        else:
            remaining = expected_remaining(state.rows, state.remaining, requests.draft_rows, requests.num_tokens)
            weights = makespan_weights(remaining, _MIN_WEIGHT, _MAX_WEIGHT)
            lengths = choose_draft_lengths(best.survivals, best.available, weights, seconds)
        ends = np.empty(len(requests), dtype=np.int64)
        tokens = _record_drafts(state.rows, requests.draft_rows, best.tokens, lengths, ends).tolist()
        if seconds is not None:
            self._last_seconds = float(seconds[0]), float(seconds[len(tokens)])
        return [tokens[start:end] for start, end in pairwise([0, *ends.tolist()])]

    def _decide_ring_use(self, num_gained: float, num_accepted: float) -> None:
        """Search the ring in every forward while it adds accepted tokens; otherwise search it rarely, as a trial."""
        if self._state.uses_ring[0]:
            self._num_ring_trials += 1
            self._num_ring_gained += num_gained
            self._num_accepted += num_accepted
        if self._num_ring_trials >= (_FEW_RING_TRIALS if self._num_accepted >= _ENOUGH_ACCEPTED else _RING_TRIALS):
            self._uses_ring = self._num_ring_gained > _MIN_RING_GAIN * self._num_accepted
            # earlier trials keep half their weight, so that one bad stretch does not change the decision
            self._num_ring_trials, self._num_ring_gained, self._num_accepted = (
                0,
                self._num_ring_gained / 2,
                self._num_accepted / 2,
            )
        self._state.uses_ring[0] = self._uses_ring or self._num_forwards % _RING_TRIAL_EVERY == 0

    def _count(self, requests: DraftRequests) -> None:
        """Count the tokens that the last forward emitted, and the time saved over plain forwards of one token a row."""
        sums = self._state.sums
        num_rows, num_emitted = sums[ROWS], sums[EMITTED]
        count_emitted(self._state.rows, sums, requests.draft_rows, requests.num_tokens)
        if self._last_seconds is not None and sums[ROWS] > num_rows:
            plain, spent = self._last_seconds
            self._saved_s += plain * (sums[EMITTED] - num_emitted) / (sums[ROWS] - num_rows) - spent
        self._last_seconds = None

    def _rest(self, num_rows: int, began: float) -> list[list[int]]:
        """Neither draft nor learn; `update_state` reads the tokens emitted meanwhile later, all at once."""
        self._num_resting = max(self._num_resting - 1, 0)
        self._propose_s += time.perf_counter() - began
        return [[] for _ in range(num_rows)]

    def _back_off(self, useful: bool, share: float) -> None:
        """Rest after many useless forwards, for growing intervals, if drafting took a noticeable share of a forward."""
        self._num_useless = 0 if useful else self._num_useless + 1
        if self._num_useless >= _MAX_USELESS and share > _NOTICEABLE:
            self._num_resting = min(1 << (self._num_useless - _MAX_USELESS), _MAX_REST)

    def _set_state(self, state: DraftState) -> None:
        """Replace arrays of the state, and with them the table that kernels take."""
        self._state, self._table = state, table_of(state)

    def _add_group(self, prompt_key: int, prompt_length: int, region_size: int, step: int) -> None:
        if not self._free_groups:
            size = len(self._state.groups)
            self._set_state(with_groups(self._state, size + _ROWS_ADDED))
            self._free_groups = list(reversed(range(size, size + _ROWS_ADDED)))
        index = self._free_groups.pop()
        group = DraftGroup(prompt_key=prompt_key, prompt_length=prompt_length, region_size=region_size, step=step)
        self._groups[prompt_key] = index, group
        self._attach(group)
        self._state.groups[index, PROMPT_LEFT] = prompt_length
        self._state.remaining[index] = group.remaining()

    def _attach(self, group: DraftGroup) -> bool:
        if self._directory is None:
            return False
        try:
            return group.attach(self._directory)
        except SegmentError as error:
            self._num_damaged += 1
            _log.warning("drafting a prompt without its history: %s", error)
            return False

    def _retry_segments(self) -> None:
        for index, group in self._groups.values():
            if group.segment is None and self._attach(group):
                group.write(self._state.groups[index])
                self._state.remaining[index] = group.remaining()

    def _rehash(self) -> None:
        """Rehash living texts that have outgrown their buckets."""
        self._state.sums[CROWDED] = 0
        for index, group in self._groups.values():
            row = self._state.groups[index]
            if row[NUM_LIVE] > 2 * row[NUM_BUCKETS]:
                group.rehash()
                group.write(row)


@kernel
def _totals(rooms: TokenIds, num_tokens: TokenIds, max_draft_tokens: int) -> tuple[int, int]:
    """Most tokens that can be drafted in all, and tokens of all texts."""
    most, context = 0, 0
    for row in range(len(rooms)):
        most += min(rooms[row], max_draft_tokens)
        context += num_tokens[row]
    return most, context


@kernel
def _record_drafts(columns: Longs, draft_rows: Longs, drafts: TokenIds, lengths: TokenIds, ends: Longs) -> TokenIds:
    """Record each row's draft length, and join the drafts; row i's draft ends at ends[i]."""
    flat = np.empty(lengths.sum(), dtype=np.int32)
    end = 0
    for row in range(len(draft_rows)):
        for k in range(lengths[row]):
            flat[end + k] = drafts[row, k]
        end += lengths[row]
        ends[row] = end
        if draft_rows[row] >= 0:
            columns[draft_rows[row], DRAFTED] = lengths[row]
    return flat
