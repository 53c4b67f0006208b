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
from history.drafting.forward import ALL, CANNOT_PAY, CHOOSE, COUNT, IS_CROWDED, RING_TRIAL, SEARCH, draft, totals
from history.drafting.forward_cost import ForwardCostModel
from history.drafting.parallel import DraftThreads
from history.drafting.prompt_group import DraftGroup
from history.drafting.recent_ring import REGION, append_finished
from history.drafting.ring_use import RING_TRIAL_EVERY
from history.drafting.state import (
    ACCEPTED,
    ACCEPTED_BY,
    CHOSEN,
    COUNTED,
    CROWDED,
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
    SAVED,
    SURVIVED,
    Doubles,
    DraftState,
    Longs,
    fresh_state,
    with_batch,
    with_groups,
    with_rows,
)
from history.drafting.stats import DraftStats
from history.index.segment import SegmentError
from history.types import TokenIds

_log = logging.getLogger(__name__)

_RETRY_SEGMENTS_EVERY = 64
"""Forwards between two attempts to attach missing or damaged segments."""
_ROWS_ADDED = 64
"""Draft rows, and groups, added at a time."""
_MAX_USELESS = 8
"""Consecutive forwards without drafts after which the drafter rests."""
_MAX_REST = 16
_NOTICEABLE = 0.005
"""Share of a forward above which the drafter's own time is worth saving."""
_LONG, _INT = np.dtype(np.int64), np.dtype(np.int32)
_NO_PRICES: Doubles = np.zeros(0)


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
        self._max_model_len = max_model_len
        self._threads = DraftThreads(num_threads, max_draft_tokens=max_draft_tokens)
        self._set_state(fresh_state(max_draft_tokens, threshold))
        self._groups: dict[int, tuple[int, DraftGroup]] = {}
        self._open_rows: dict[int, tuple[int, DraftGroup]] = {}
        self._free_groups: list[int] = []
        self._free_rows: list[int] = []
        self._num_useless, self._num_resting = 0, 0
        self._num_forwards, self._num_requests, self._num_hits, self._num_damaged = 0, 0, 0, 0
        self._propose_s = 0.0

    def open(
        self, *, prompt_key: int, prompt_length: int, max_length: int, step: int = 0, is_counted: bool = True
    ) -> int:
        """Add a request and return its draft row.

        Args:
            prompt_key: key of the prompt; requests of one prompt share history and living text.
            prompt_length: tokens of the prompt.
            max_length: tokens of the prompt and of the longest response.
            step: current step, from which the age of a past response is computed.
            is_counted: whether `DraftStats.num_requests` counts it.
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
        self._num_requests += is_counted
        self._num_hits += is_counted and group.segment is not None
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
        # other dtypes would compile new kernels in the middle of a run
        draft_rows, num_tokens = np.asarray(draft_rows, _LONG), np.asarray(num_tokens, _INT)
        token_ids, rooms = np.ascontiguousarray(token_ids, _INT), np.asarray(rooms, _INT)
        num_rows = len(draft_rows)
        self._num_forwards += 1
        if self._num_forwards % _RETRY_SEGMENTS_EVERY == 0:
            self._retry_segments()
        if num_rows > len(self._state.available):
            self._set_state(with_batch(self._state, num_rows))
        seconds = _NO_PRICES
        if self._cost_model is not None:
            most, context = totals(rooms, num_tokens, self._max_draft_tokens)
            seconds = self._cost_model.seconds_by_tokens(num_rows, num_rows + most, context)
        steps = ALL if self._num_resting == 0 else COUNT
        if self._num_forwards % RING_TRIAL_EVERY == 0:
            steps |= RING_TRIAL
        num_drafted = self._draft(draft_rows, token_ids, num_tokens, rooms, seconds, steps)
        drafts = self._drafts(num_rows, num_drafted)
        spent = time.perf_counter() - began
        self._propose_s += spent
        if num_drafted == CANNOT_PAY or self._num_resting > 0:
            self._num_resting = max(self._num_resting - 1, 0)
        elif self._cost_model is not None:
            self._back_off(num_drafted > 0, spent / seconds[0])
        return drafts

    def drain(self, *, keeps_requests: bool = False) -> DraftStats:
        """Return the counters since the last call, and reset them; with `keeps_requests` not those of requests."""
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
            saved_s=float(sums[SAVED]),
        )
        sums[:] = 0
        self._state.recent_survival[:2] = 0
        self._num_forwards, self._propose_s = 0, 0.0
        if not keeps_requests:
            self._num_requests, self._num_hits, self._num_damaged = 0, 0, 0
        return stats

    def _draft(
        self,
        draft_rows: Longs,
        token_ids: TokenIds,
        num_tokens: TokenIds,
        rooms: TokenIds,
        seconds: Doubles,
        steps: int,
    ) -> int:
        """Run these steps of `history.drafting.forward`; the search on as many threads as the batch can use."""
        num_rows = len(draft_rows)
        tables, requests = self._tables, (draft_rows, token_ids, num_tokens, rooms, seconds)
        splits = steps & SEARCH and self._threads.num_parts(num_rows) > 1
        result = draft(tables[0], *requests, steps & ~(SEARCH | CHOOSE) if splits else steps, 0, num_rows)
        if result == IS_CROWDED:
            self._rehash()
        if result == CANNOT_PAY or not (splits or result == IS_CROWDED):
            return int(result)
        if splits:
            self._threads.run(lambda part, begin, end: draft(tables[part], *requests, SEARCH, begin, end), num_rows)
            return int(draft(tables[0], *requests, CHOOSE, 0, 0))
        return int(draft(tables[0], *requests, SEARCH | CHOOSE, 0, num_rows))

    def _drafts(self, num_rows: int, num_drafted: int) -> list[list[int]]:
        if num_drafted <= 0:
            return [[] for _ in range(num_rows)]
        tokens, ends = self._state.drafted[:num_drafted].tolist(), self._state.ends[: num_rows + 1].tolist()
        return [tokens[start:end] for start, end in pairwise(ends)]

    def _back_off(self, useful: bool, share: float) -> None:
        """Rest after many useless forwards, for growing intervals, if drafting took a noticeable share of a forward."""
        self._num_useless = 0 if useful else self._num_useless + 1
        if self._num_useless >= _MAX_USELESS and share > _NOTICEABLE:
            self._num_resting = min(1 << (self._num_useless - _MAX_USELESS), _MAX_REST)

    def _set_state(self, state: DraftState) -> None:
        """Replace arrays of the state, and with them the tables that kernels take."""
        self._state, self._tables = state, self._threads.tables(state)

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
