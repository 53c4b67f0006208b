"""Drafts for a batch of requests: what their prompts' history says comes next, as far as it is worth verifying."""

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from history.draft_stats import DraftStats
from history.kernel import int32s_at, kernel
from history.match import follow, longest_match
from history.segment import Segment, SegmentError, attach_segment
from history.types import TokenIds

_MAX_PLACES = 8
_LOOK_AGAIN = 64
"""Forwards after which a file that was missing or damaged is looked for again."""

_PROMPT_LENGTH, _TOKENS, _ORDER, _NUM_TOKENS = range(4)
"""Columns of the table of slots; addresses of the arrays of an attached segment, 0 tokens without one."""

Longs = npt.NDArray[np.int64]


class Drafter:
    """Drafts of one engine process. `open`, `close` and `propose` mutate; not for several threads."""

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        segments_dir: str = "",
        prices: None = None,
        threshold: float = 0.1,
        max_model_len: int = 1 << 30,
    ) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._directory = Path(segments_dir) if segments_dir else None
        self._threshold = threshold
        self._max_model_len = max_model_len
        self._table: Longs = np.zeros((64, 4), dtype=np.int64)
        self._free = list(range(63, -1, -1))
        self._open: dict[int, tuple[int, Segment | None]] = {}
        self._num_forwards = 0
        self._stats = DraftStats()

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int) -> int:
        """The slot of a request that appeared; `max_length` is its prompt and its longest response, tokens."""
        if not self._free:
            size = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._free.pop()
        self._open[slot] = prompt_key, None
        self._table[slot] = prompt_length, 0, 0, 0
        self._attach(slot)
        self._stats += DraftStats(num_requests=1, num_hits=int(self._open[slot][1] is not None))
        return slot

    def close(self, slot: int) -> None:
        """The request is gone; its slot may be given out again."""
        del self._open[slot]
        self._table[slot] = 0
        self._free.append(slot)

    def propose(self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Draft tokens for each row of a batch.

        Row i belongs to `slots[i]` (-1: no draft), its text (prompt and output, newest token included) is
        token_ids[i, :num_tokens[i]], and at most rooms[i] tokens may be drafted.
        """
        began = time.perf_counter()
        self._num_forwards += 1
        if self._num_forwards % _LOOK_AGAIN == 0:
            for slot, (_, segment) in list(self._open.items()):
                if segment is None:
                    self._attach(slot)
        drafts = np.empty((len(slots), self._max_draft_tokens), dtype=np.int32)
        lengths = np.empty(len(slots), dtype=np.int64)
        _draft(slots, token_ids, num_tokens, rooms, self._table, self._threshold, drafts, lengths)
        found = [row[:length] for row, length in zip(drafts.tolist(), lengths.tolist(), strict=True)]
        self._stats += DraftStats(num_forwards=1, num_drafted=int(lengths.sum()), propose_s=time.perf_counter() - began)
        return found

    def drain(self) -> DraftStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, DraftStats()
        return stats

    def _attach(self, slot: int) -> None:
        if self._directory is None:
            return
        key = self._open[slot][0]
        try:
            segment = attach_segment(self._directory, key)
        except SegmentError:
            return
        if segment is not None:
            self._open[slot] = key, segment
            self._table[slot, 1:] = segment.tokens.ctypes.data, segment.order.ctypes.data, len(segment.tokens)


@kernel
def _draft(
    slots: Longs,
    token_ids: TokenIds,
    num_tokens: TokenIds,
    rooms: TokenIds,
    table: Longs,
    threshold: float,
    drafts: TokenIds,
    lengths: Longs,
) -> None:
    """Fill `drafts` [R, K] and `lengths` [R]."""
    places = np.empty(_MAX_PLACES, dtype=np.int32)
    shares = np.empty(drafts.shape[1], dtype=np.float32)
    for row in range(len(slots)):
        lengths[row] = 0
        slot = slots[row]
        if slot < 0 or table[slot, _NUM_TOKENS] == 0:
            continue
        tokens = int32s_at(table[slot, _TOKENS], table[slot, _NUM_TOKENS])
        order = int32s_at(table[slot, _ORDER], table[slot, _NUM_TOKENS])
        count, matched = longest_match(
            tokens, order, token_ids[row], num_tokens[row], table[slot, _PROMPT_LENGTH], places
        )
        drafted = follow(tokens, places, count, min(rooms[row], drafts.shape[1]), drafts[row], shares)
        survival = 1.0 - 1.0 / (matched + 1.0)
        for k in range(drafted):
            survival *= shares[k] * 0.9
            if survival < threshold:
                break
            lengths[row] = k + 1
