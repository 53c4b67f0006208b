"""Drafts for a batch of requests: what their prompts' history says comes next, as far as it is worth verifying.

Nothing here is remote, and nothing is Python per token. A segment that is missing or damaged costs its
prompt drafts from history and nothing else; it is looked for again later. Where drafts cannot pay, or the
texts of this batch give nothing to draft, the drafter rests: it costs next to nothing then, and tries again.
"""

import logging
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from history.drafting.acceptance import NUM_BINS
from history.drafting.draft_length import break_even, choose_draft_lengths, makespan_weights
from history.drafting.forward_cost import PriceSurface
from history.drafting.parallel import DraftThreads
from history.drafting.prompt_group import DraftGroup
from history.drafting.recent_ring import REGION, keep
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
    REST_POINTS,
    ROWS,
    SHARED_END,
    SHARED_STOP,
    SURVIVED,
    Doubles,
    DraftState,
    Floats,
    Longs,
    fresh_state,
    with_groups,
    with_slots,
)
from history.drafting.stats import DraftStats
from history.drafting.update import absorb, tally
from history.index.segment import SegmentError
from history.jit import kernel
from history.types import TokenIds

_log = logging.getLogger(__name__)

_LOOK_AGAIN = 64
"""Forwards after which a segment that was missing or damaged is looked for again."""
_MORE = 64
"""Slots and groups that are added at a time."""
_LEAST_WEIGHT, _MOST_WEIGHT = 0.5, 4.0
"""Bounds of a row's makespan weight."""
_PATIENCE = 8
"""Forwards in a row without anything worth drafting after which the drafter rests."""
_LONGEST_REST = 16
_LOOKS, _SELDOM = 32, 16
"""Forwards after which it is judged whether looking into other prompts' texts pays, and of how many one does if not."""
_FEW_LOOKS, _ENOUGH = 8, 4000
"""Forwards and accepted tokens after which it is judged in a large batch. Fewer may misjudge: see decision 19."""
_LEAST_GAINED = 0.05
"""Share of the accepted tokens that must have come from there alone: looking takes about a millisecond for 256 rows, a
twentieth of a forward of 20 ms."""
_TRUST_MEMORY = 64.0
"""Tokens that were expected to survive, of which it is remembered how many did."""
_LEAST_KEPT = 0.75
"""Share of what is remembered that one forward leaves, however many tokens it drafts."""
_TRUST_PRIOR, _TRUST_BAND = 4.0, 2.0
"""Tokens added to both, and what the ratio is multiplied by: down to a half it is taken for chance."""
_NOTICEABLE = 0.005
"""Share of a forward from which the drafter's own time is worth saving."""


class Drafter:
    """Drafts of one engine process. `open`, `close`, `propose` and `drain` mutate; not for several threads."""

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        segments_dir: str = "",
        prices: PriceSurface | None = None,
        threshold: float = 0.1,
        max_model_len: int = 1 << 30,
        num_threads: int = 1,
    ) -> None:
        """Prepare to draft.

        Args:
            max_draft_tokens: most tokens of one draft.
            segments_dir: folder in which the prompts' segments lie; empty: there is no history.
            prices: decide how much of a draft is worth its forward; None: all that survives with `threshold`.
            threshold: least probability of survival of a draft token, without prices.
            max_model_len: most tokens of a text.
            num_threads: that large batches are drafted on (`history.drafting.parallel`).
        """
        self._max_draft_tokens = max_draft_tokens
        self._directory = Path(segments_dir) if segments_dir else None
        self._prices = prices
        self._threshold = threshold
        self._max_model_len = max_model_len
        self._state: DraftState = fresh_state(max_draft_tokens)
        self._threads = DraftThreads(num_threads, max_draft_tokens=max_draft_tokens)
        self._groups: dict[int, tuple[int, DraftGroup]] = {}
        self._slots: dict[int, tuple[int, DraftGroup]] = {}
        self._free_groups: list[int] = []
        self._free_slots: list[int] = []
        self._num_useless, self._num_resting = 0, 0
        self._is_sharing, self._num_looks = True, 0
        self._num_gained, self._num_accepted = 0.0, 0.0
        self._last_prices: tuple[float, float] | None = None
        """Of the forward under way: seconds of a plain one, and of this one."""
        self._num_forwards, self._num_requests, self._num_hits, self._num_damaged = 0, 0, 0, 0
        self._propose_s, self._saved_s = 0.0, 0.0
        self._trust = np.zeros(4)
        """Tokens expected to survive and those that did: at the last forward by `DraftState.sums`, and remembered."""

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int, step: int = 0) -> int:
        """The slot of a request that appeared.

        Args:
            prompt_key: what it shares its history with.
            prompt_length: tokens of its prompt.
            max_length: tokens of its prompt and of its longest response.
            step: that it is sampled for; tells how old a past response is.
        """
        if prompt_key not in self._groups:
            most = min(max_length, self._max_model_len) - prompt_length
            self._add_group(prompt_key, prompt_length, max(most, 0) + 2, step)
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
        self._num_requests += 1
        self._num_hits += group.segment is not None
        return slot

    def close(self, slot: int) -> None:
        """The request is gone. With the last one of a prompt its living text goes, and its segment is let go."""
        index, group = self._slots.pop(slot)
        self._free_slots.append(slot)
        row = self._state.slots[slot]
        start, end = int(row[LIVE_STOP]) - group.room, int(row[LIVE_END])
        if row[SHARED_END] == row[SHARED_STOP] or end - start > REGION:
            keep(self._state.ring, self._state.ring_buckets, self._state.ring_end, group.text, start, end)
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
        # another dtype would be compiled anew, in the middle of a run
        slots, num_tokens = np.asarray(slots, dtype=np.int64), np.asarray(num_tokens, dtype=np.int32)
        rooms, token_ids = np.asarray(rooms, dtype=np.int32), np.ascontiguousarray(token_ids, dtype=np.int32)
        self._num_forwards += 1
        if self._num_forwards % _LOOK_AGAIN == 0:
            self._look_again()
        self._count(slots, num_tokens)
        seconds = None
        if self._prices is not None:
            num_rows, most = len(slots), int(np.minimum(rooms, self._max_draft_tokens).sum())
            context = int(num_tokens.sum())
            seconds = self._prices.seconds_by_tokens(num_rows, num_rows + max(most, 0), context)
            if self._num_resting or break_even(seconds, num_rows) >= 1:
                return self._rest(slots, seconds, began)
        found = self._draft(slots, token_ids, num_tokens, rooms, seconds)
        spent = time.perf_counter() - began
        self._propose_s += spent
        if seconds is not None:
            self._tire(any(found), spent / seconds[0])
        return found

    def drain(self) -> DraftStats:
        """What happened since the last call."""
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
        self._trust[:2] = 0
        self._num_forwards, self._num_requests, self._num_hits, self._num_damaged = 0, 0, 0, 0
        self._propose_s, self._saved_s = 0.0, 0.0
        return stats

    def _draft(
        self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds, seconds: Doubles | None
    ) -> list[list[int]]:
        state, num_rows = self._state, len(slots)
        sums = state.sums
        num_gained, num_accepted = sums[GAINED], sums[ACCEPTED]
        absorb(state, slots, token_ids, num_tokens)
        self._weigh_sharing(sums[GAINED] - num_gained, sums[ACCEPTED] - num_accepted)
        if state.sums[CROWDED]:
            self._spread()
        drafts = np.empty((num_rows, self._max_draft_tokens), dtype=np.int32)
        survivals = np.empty((num_rows, self._max_draft_tokens), dtype=np.float32)
        available = np.empty(num_rows, dtype=np.int32)
        self._threads.propose(state, slots, token_ids, num_tokens, rooms, drafts, survivals, available)
        lower_where_few_survive(self._trust, sums, survivals, available)
        if seconds is None:
            lengths = _above(survivals, available, self._threshold)
        else:
            weights = makespan_weights(
                _remaining(state.slots, state.remaining, slots, num_tokens), _LEAST_WEIGHT, _MOST_WEIGHT
            )
            lengths = choose_draft_lengths(survivals, available, weights, seconds)
        ends = np.empty(num_rows, dtype=np.int64)
        tokens = _settle(state.slots, slots, drafts, lengths, ends).tolist()
        if seconds is not None:
            self._last_prices = float(seconds[0]), float(seconds[len(tokens)])
        return [tokens[start:end] for start, end in pairwise([0, *ends.tolist()])]

    def _weigh_sharing(self, num_gained: float, num_accepted: float) -> None:
        """Look into the ring in every forward as long as it adds something, else in few, to see whether it does."""
        if self._state.shares[0]:
            self._num_looks += 1
            self._num_gained += num_gained
            self._num_accepted += num_accepted
        if self._num_looks >= (_FEW_LOOKS if self._num_accepted >= _ENOUGH else _LOOKS):
            self._is_sharing = self._num_gained > _LEAST_GAINED * self._num_accepted
            # what was seen before counts half: a judgement is not overthrown by one bad stretch
            self._num_looks, self._num_gained, self._num_accepted = 0, self._num_gained / 2, self._num_accepted / 2
        self._state.shares[0] = self._is_sharing or self._num_forwards % _SELDOM == 0

    def _count(self, slots: Longs, num_tokens: TokenIds) -> None:
        """Count what the last forward emitted, and what it saved: plain forwards emit one token a row each."""
        sums = self._state.sums
        rows, emitted = sums[ROWS], sums[EMITTED]
        tally(self._state.slots, sums, slots, num_tokens)
        if self._last_prices is not None and sums[ROWS] > rows:
            plain, spent = self._last_prices
            self._saved_s += plain * (sums[EMITTED] - emitted) / (sums[ROWS] - rows) - spent
        self._last_prices = None

    def _rest(self, slots: Longs, seconds: Doubles, began: float) -> list[list[int]]:
        """Draft nothing and learn nothing; what is emitted meanwhile is taken in later, all at once."""
        self._num_resting = max(self._num_resting - 1, 0)
        self._propose_s += time.perf_counter() - began
        return [[] for _ in range(len(slots))]

    def _tire(self, useful: bool, share: float) -> None:
        """Rest after many useless forwards, ever longer, if drafting took a noticeable share of a forward."""
        self._num_useless = 0 if useful else self._num_useless + 1
        if self._num_useless >= _PATIENCE and share > _NOTICEABLE:
            self._num_resting = min(1 << (self._num_useless - _PATIENCE), _LONGEST_REST)

    def _add_group(self, prompt_key: int, prompt_length: int, region_size: int, step: int) -> None:
        if not self._free_groups:
            size = len(self._state.groups)
            self._state = with_groups(self._state, size + _MORE)
            self._free_groups = list(reversed(range(size, size + _MORE)))
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
            _log.warning("drafting without the history of a prompt: %s", error)
            return False

    def _look_again(self) -> None:
        for index, group in self._groups.values():
            if group.segment is None and self._attach(group):
                group.write(self._state.groups[index])
                self._state.remaining[index] = group.remaining()

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
def lower_where_few_survive(trust: Doubles, sums: Doubles, survivals: Floats, available: TokenIds) -> None:
    """Lower all survivals where far fewer tokens survive of late than was expected.

    Rates are learned cell by cell, for hundreds of tokens each. When a history stops being of use, as with prompts
    whose answers have nothing to do with it, all of them are too high at once.

    Args:
        trust: [4], tokens expected to survive and those that did, by `sums` at the last call, and remembered; changed.
        sums: of `DraftState`.
        survivals: [R, K], changed.
        available: [R], how many of each row there are.
    """
    now = np.zeros(2)
    for i in range(NUM_BINS):
        now[0] += sums[PREDICTED + i]
        now[1] += sums[SURVIVED + i]
    kept = max(1.0 - (now[0] - trust[0]) / _TRUST_MEMORY, _LEAST_KEPT)
    for i in range(2):
        trust[2 + i] = kept * trust[2 + i] + now[i] - trust[i]
        trust[i] = now[i]
    factor = _TRUST_BAND * (trust[3] + _TRUST_PRIOR) / (trust[2] + _TRUST_PRIOR)
    if factor < 1.0:
        for row in range(len(available)):
            for k in range(available[row]):
                survivals[row, k] *= factor


@kernel
def _remaining(columns: Longs, remaining: Doubles, slots: Longs, num_tokens: TokenIds) -> Doubles:
    """Expected remaining tokens of each row; none is expected of a row without a slot."""
    found = np.zeros(len(slots))
    for row in range(len(slots)):
        if slots[row] >= 0:
            table = remaining[columns[slots[row], GROUP]]
            place = (num_tokens[row] - columns[slots[row], PROMPT_LENGTH]) / table[REST_POINTS]
            below = min(max(int(place), 0), REST_POINTS - 2)
            part = min(max(place - below, 0.0), 1.0)
            found[row] = table[below] * (1 - part) + table[below + 1] * part
    return found


@kernel
def _settle(columns: Longs, slots: Longs, drafts: TokenIds, lengths: TokenIds, ends: Longs) -> TokenIds:
    """Remember how much is drafted of each row; all drafts one after another, row i's up to ends[i]."""
    flat = np.empty(lengths.sum(), dtype=np.int32)
    end = 0
    for row in range(len(slots)):
        for k in range(lengths[row]):
            flat[end + k] = drafts[row, k]
        end += lengths[row]
        ends[row] = end
        if slots[row] >= 0:
            columns[slots[row], DRAFTED] = lengths[row]
    return flat
