"""Drafts for a batch of requests: what their prompts' history says comes next, as far as it is worth verifying.

Nothing here is remote, and nothing is Python per token. A segment that is missing or damaged costs its
prompt drafts from history and nothing else; it is looked for again later.
"""

import time
from pathlib import Path

import numpy as np

from history.acceptance import NUM_BINS
from history.draft_stats import DraftStats
from history.groups import DraftGroup
from history.kernel import kernel
from history.learn import absorb
from history.propose import propose
from history.segment import SegmentError
from history.slots import (
    ACCEPTED,
    ACCEPTED_BY,
    CHOSEN,
    COUNTED,
    CROWDED,
    DRAFTED,
    EMITTED,
    GROUP,
    LIVE_END,
    LIVE_STOP,
    NUM_BUCKETS,
    NUM_LIVE,
    PREDICTED,
    PROMPT_LENGTH,
    PROPOSED,
    PROPOSED_BY,
    ROWS,
    SURVIVED,
    DraftState,
    Floats,
    Longs,
    fresh_state,
    with_groups,
    with_slots,
)
from history.types import TokenIds

_LOOK_AGAIN = 64
"""Forwards after which a segment that was missing or damaged is looked for again."""
_MORE = 64
"""Slots and groups that are added at a time."""


class Drafter:
    """Drafts of one engine process. `open`, `close`, `propose` and `drain` mutate; not for several threads."""

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        segments_dir: str = "",
        prices: None = None,
        threshold: float = 0.1,
        max_model_len: int = 1 << 30,
    ) -> None:
        """Prepare to draft at most `max_draft_tokens` a request and forward."""
        self._max_draft_tokens = max_draft_tokens
        self._directory = Path(segments_dir) if segments_dir else None
        self._threshold = threshold
        self._max_model_len = max_model_len
        self._state: DraftState = fresh_state(max_draft_tokens)
        self._groups: dict[int, tuple[int, DraftGroup]] = {}
        self._slots: dict[int, tuple[int, DraftGroup]] = {}
        self._free_groups: list[int] = []
        self._free_slots: list[int] = []
        self._stats = DraftStats()
        self._num_forwards = 0
        self._propose_s = 0.0

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int) -> int:
        """The slot of a request that appeared.

        Args:
            prompt_key: what it shares its history with.
            prompt_length: tokens of its prompt.
            max_length: tokens of its prompt and of its longest response.
        """
        if prompt_key not in self._groups:
            self._add_group(prompt_key, prompt_length, min(max_length, self._max_model_len) - prompt_length + 2)
        index, group = self._groups[prompt_key]
        if not self._free_slots:
            size = len(self._state.slots)
            self._state = with_slots(self._state, size + _MORE)
            self._free_slots = list(reversed(range(size, size + _MORE)))
        slot = self._free_slots.pop()
        self._slots[slot] = index, group
        group.num_open += 1
        row = self._state.slots[slot]
        row[:] = 0
        row[PROMPT_LENGTH], row[GROUP], row[CHOSEN] = prompt_length, index, -1
        row[LIVE_END], row[LIVE_STOP] = group.add_region()
        group.write(self._state.groups[index])
        self._state.lengths[slot] = 0
        self._stats += DraftStats(num_requests=1, num_hits=int(group.segment is not None))
        return slot

    def close(self, slot: int) -> None:
        """The request is gone. With the last one of a prompt its living text goes, and its segment is let go."""
        index, group = self._slots.pop(slot)
        self._free_slots.append(slot)
        group.num_open -= 1
        if group.num_open == 0:
            del self._groups[group.prompt_key]
            self._state.groups[index] = 0
            self._free_groups.append(index)

    def propose(self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Draft tokens for each row of a batch.

        Args:
            slots: [R], -1 for a row without drafts.
            token_ids: [B, L], B at least R: texts, prompt and output.
            num_tokens: [R], how many tokens each text has, the newest included.
            rooms: [R], most tokens to draft for each row.
        """
        began = time.perf_counter()
        self._num_forwards += 1
        state = self._state
        absorb(state, slots, token_ids, num_tokens)
        if state.sums[CROWDED]:
            self._spread()
        drafts = np.empty((len(slots), self._max_draft_tokens), dtype=np.int32)
        survivals = np.empty((len(slots), self._max_draft_tokens), dtype=np.float32)
        available = np.empty(len(slots), dtype=np.int32)
        propose(state, slots, token_ids, num_tokens, rooms, drafts, survivals, available)
        lengths = _above(survivals, available, self._threshold)
        ends = np.empty(len(slots), dtype=np.int64)
        flat = _settle(state, slots, drafts, lengths, ends)
        tokens, found, start = flat.tolist(), [], 0
        for end in ends.tolist():
            found.append(tokens[start:end])
            start = end
        if self._num_forwards % _LOOK_AGAIN == 0:
            self._look_again()
        self._propose_s += time.perf_counter() - began
        return found

    def drain(self) -> DraftStats:
        """What happened since the last call."""
        sums = self._state.sums
        stats = self._stats + DraftStats(
            num_forwards=self._num_forwards,
            num_rows=int(sums[ROWS]),
            num_emitted=int(sums[EMITTED]),
            num_drafted=int(sums[PROPOSED]),
            num_accepted=int(sums[ACCEPTED]),
            drafted_by_source=tuple(int(x) for x in sums[PROPOSED_BY:ACCEPTED_BY]),
            accepted_by_source=tuple(int(x) for x in sums[ACCEPTED_BY:COUNTED]),
            calibration_count=tuple(int(x) for x in sums[COUNTED:PREDICTED]),
            calibration_predicted=tuple(sums[PREDICTED:SURVIVED].tolist()),
            calibration_survived=tuple(int(x) for x in sums[SURVIVED : SURVIVED + NUM_BINS]),
            propose_s=self._propose_s,
        )
        sums[:] = 0
        self._stats, self._num_forwards, self._propose_s = DraftStats(), 0, 0.0
        return stats

    def _add_group(self, prompt_key: int, prompt_length: int, region_size: int) -> None:
        if not self._free_groups:
            size = len(self._state.groups)
            self._state = with_groups(self._state, size + _MORE)
            self._free_groups = list(reversed(range(size, size + _MORE)))
        index = self._free_groups.pop()
        group = DraftGroup(prompt_key=prompt_key, prompt_length=prompt_length, region_size=region_size)
        self._groups[prompt_key] = index, group
        self._attach(group)

    def _attach(self, group: DraftGroup) -> bool:
        if self._directory is None:
            return False
        try:
            return group.attach(self._directory)
        except SegmentError:
            return False

    def _look_again(self) -> None:
        for index, group in self._groups.values():
            if group.segment is None and self._attach(group):
                group.write(self._state.groups[index])

    def _spread(self) -> None:
        """Give living texts that have outgrown their buckets more of them."""
        self._state.sums[CROWDED] = 0
        for index, group in self._groups.values():
            row = self._state.groups[index]
            if row[NUM_LIVE] > 2 * row[NUM_BUCKETS]:
                group.spread()
                group.write(row)


@kernel
def _above(survivals: Floats, available: TokenIds, threshold: float) -> TokenIds:
    lengths = np.zeros(len(available), dtype=np.int32)
    for row in range(len(available)):
        while lengths[row] < available[row] and survivals[row, lengths[row]] >= threshold:
            lengths[row] += 1
    return lengths


@kernel
def _settle(state: DraftState, slots: Longs, drafts: TokenIds, lengths: TokenIds, ends: Longs) -> TokenIds:
    """Remember how much is drafted of each row; all drafts one after another, row i's up to ends[i]."""
    flat = np.empty(lengths.sum(), dtype=np.int32)
    end = 0
    for row in range(len(slots)):
        for k in range(lengths[row]):
            flat[end + k] = drafts[row, k]
        end += lengths[row]
        ends[row] = end
        if slots[row] >= 0:
            state.slots[slots[row], DRAFTED] = lengths[row]
    return flat
