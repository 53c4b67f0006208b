"""Segment and living text of one prompt's requests in this process.

The group owns the arrays whose addresses are in the table of groups. The drafter writes the group's row whenever they
change.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from history.drafting.acceptance import origins
from history.drafting.live_text import BUCKET, BY_ONE_AND_THREE, BY_THREE, reindex
from history.drafting.state import (
    BUCKETS,
    FENCES,
    LIVE_SIZE,
    LIVE_TEXT,
    NUM_BUCKETS,
    NUM_FENCES,
    NUM_RESPONSES,
    NUM_TOKENS,
    ORDER,
    RESPONSES,
    REST_POINTS,
    TOKENS,
    Doubles,
    Longs,
)
from history.index.segment import HistorySegment, attach_segment
from history.index.suffix_array import SEPARATOR
from history.lengths.estimate import remaining_after, visit_weights

_FIRST_REGIONS = 4
_FIRST_BUCKETS = 1 << 8
_GROWTH = 4

Numbers = npt.NDArray[np.int32]


class DraftGroup:
    """Requests of one prompt. `add_region`, `attach` and `rehash` mutate; call `write` afterwards."""

    def __init__(self, *, prompt_key: int, prompt_length: int, region_size: int, step: int) -> None:
        self.prompt_key = prompt_key
        self._step = step
        self.segment: HistorySegment | None = None
        self.num_open = 0
        """Running requests."""
        self._region_size = region_size
        self._num_used = prompt_length + 2
        self._text: Numbers = np.full(self._num_used + _FIRST_REGIONS * region_size, SEPARATOR, dtype=np.int32)
        self._buckets: Numbers = np.full((_FIRST_BUCKETS, BUCKET), -1, dtype=np.int32)
        self._responses: Numbers = np.zeros(0, dtype=np.int32)

    @property
    def text(self) -> Numbers:
        """Living text: the prompt, and a region for every response."""
        return self._text

    @property
    def room(self) -> int:
        """Tokens that a region can hold."""
        return self._region_size - 2

    @property
    def num_bytes(self) -> int:
        """Bytes of the group's own arrays, without the segment."""
        return self._text.nbytes + self._buckets.nbytes

    def add_region(self) -> tuple[int, int]:
        """Add a region for one more response; return the first position and the end of the region."""
        base = self._num_used
        self._num_used += self._region_size
        if self._num_used > len(self._text):
            larger = np.full(self._num_used + base, SEPARATOR, dtype=np.int32)
            larger[:base] = self._text[:base]
            self._text = larger
        return base + 1, base + self._region_size - 1

    def attach(self, directory: Path) -> bool:
        """Attach the prompt's segment in `directory`; return False if there is none. Raises SegmentError."""
        segment = attach_segment(directory, self.prompt_key)
        if segment is None:
            return False
        self.segment = segment
        found = origins(segment.steps.tolist(), segment.rewards.tolist(), self._step)
        self._responses = np.concatenate([segment.starts, found])
        return True

    def rehash(self) -> None:
        """Index the living text again with more buckets."""
        self._buckets = np.full((_GROWTH * len(self._buckets), BUCKET), -1, dtype=np.int32)
        reindex(self._text, self._buckets, self._num_used, BY_ONE_AND_THREE if self.segment is None else BY_THREE)

    def remaining(self) -> Doubles:
        """Return expected remaining tokens of a response over an even grid, then the grid's step."""
        longest = max(self._region_size - 2, 1)
        step = longest / (REST_POINTS - 1)
        lengths = np.zeros(0, dtype=np.int32) if self.segment is None else self.segment.lengths
        weights = visit_weights([] if self.segment is None else self.segment.steps.tolist())
        emitted = np.arange(REST_POINTS) * step
        expected = remaining_after(emitted.astype(np.int64), lengths, weights, longest / 2)
        rest = np.minimum(expected, longest - emitted)
        return np.append(rest, step)

    def write(self, row: Longs) -> None:
        """Write the addresses and sizes of the arrays into the group's row."""
        row[LIVE_TEXT], row[LIVE_SIZE] = self._text.ctypes.data, len(self._text)
        row[BUCKETS], row[NUM_BUCKETS] = self._buckets.ctypes.data, len(self._buckets)
        if self.segment is not None:
            row[TOKENS], row[ORDER] = self.segment.tokens.ctypes.data, self.segment.order.ctypes.data
            row[FENCES], row[NUM_FENCES] = self.segment.fences.ctypes.data, len(self.segment.fences)
            row[RESPONSES], row[NUM_RESPONSES] = self._responses.ctypes.data, len(self.segment.starts)
            row[NUM_TOKENS] = len(self.segment.tokens)
