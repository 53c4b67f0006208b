"""HistoSpec (RhymeRL, arXiv 2508.18588), as the paper describes it and as it was released.

Both match the last 7 tokens, backing off to 3, in the last visit's responses of the same prompt only, and follow
what came next there; where continuations differ, one is chosen and the others are given up.

* paper: the continuation with the higher sum of rewards; the draft window starts at 2, grows by 2 after a draft that
  was accepted whole, is 2 again after any rejection, at most 32.
* released: the more frequent continuation, until the product of its shares falls below 0.1; the window doubles
  and halves within 2..16.

Neither says whether the prompt's end counts as context of a response's beginning; here it does, which
can only help them. Ties of reward go to the more frequent continuation. What a suffix tree finds is found in a sorted
list of positions: the same drafts; the paper gives no times to compare with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.drafting.baselines.replay import Longs
from benchmarks.harness.compiled import compiled
from history.store.traces import Trace
from history.types import TokenIds

LONGEST, SHORTEST = 7, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One prompt's last responses: each behind the prompt's last tokens and a -1, in one array."""

    tokens: TokenIds
    """[n]"""
    order: npt.NDArray[np.int32]
    """[n]: positions, sorted by the LONGEST tokens before them, nearest first."""
    rewards: npt.NDArray[np.float64]
    """[n]: of the response that a position belongs to."""


def index(visit: Sequence[Trace]) -> Visit:
    """Sort a visit's positions."""
    parts = [np.concatenate([trace.prompt_ids[-LONGEST:], trace.response_ids]) for trace in visit]
    tokens = np.concatenate([part for text in parts for part in (np.full(1, -1, dtype=np.int32), text)])
    tokens = np.append(tokens, np.int32(-1)).astype(np.int32)
    rewards = np.concatenate([np.full(len(text) + 1, trace.reward) for text, trace in zip(parts, visit, strict=True)])
    before = np.concatenate([np.full(LONGEST, -1, dtype=np.int32), tokens])
    contexts = [before[LONGEST - distance : len(before) - distance] for distance in range(1, LONGEST + 1)]
    return Visit(
        tokens=tokens,
        order=np.lexsort(contexts[::-1]).astype(np.int32),
        rewards=np.append(np.nan_to_num(rewards), 0.0),
    )


class HistoSpec:
    """The window and the choice at forks are a subclass's; so is when a draft ends."""

    first_window = 2
    by_reward = True
    least_share = 0.0

    def __init__(self) -> None:
        self._visits: dict[str, Visit] = {}
        self._open: dict[int, tuple[Visit | None, int, list[int], int]] = {}
        self._num_requests = 0
        self.survivals: Sequence[Sequence[float]] = ()

    def next_window(self, window: int, *, accepted: bool) -> int:
        """The window after a draft that was accepted whole, or not."""
        raise NotImplementedError

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None:
        """Replace what was remembered of the prompt."""
        self._visits[prompt_id] = index(visit)

    def open(self, trace: Trace, max_length: int) -> int:
        """A request with the first window."""
        self._num_requests += 1
        self._open[self._num_requests] = self._visits.get(trace.prompt_id), self.first_window, [], 0
        return self._num_requests

    def close(self, draft_row: int) -> None:
        """Forget the request."""
        del self._open[draft_row]

    def propose(self, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Look at what became of the last draft, then match and follow, row by row."""
        drafts: list[list[int]] = []
        survivals: list[list[float]] = []
        for row, (draft_row, end, room) in enumerate(
            zip(draft_rows.tolist(), num_tokens.tolist(), rooms.tolist(), strict=True)
        ):
            visit, window, last, begin = self._open[draft_row]
            if last:
                whole = token_ids[row, begin : begin + len(last)].tolist() == last and end > begin + len(last)
                window = self.next_window(window, accepted=whole)
            draft: list[int] = []
            if visit is not None:
                text = token_ids[row, max(0, end - LONGEST) : end]
                chain = np.empty(max(min(window, room), 0), dtype=np.int32)
                shares = np.empty(len(chain))
                length = _follow(
                    visit.tokens, visit.order, visit.rewards, text, self.by_reward, self.least_share, chain, shares
                )
                draft = chain[:length].tolist()
                if self.least_share:
                    survivals.append(shares[:length].tolist())
            self._open[draft_row] = visit, window, draft, end
            drafts.append(draft)
        self.survivals = survivals
        return drafts

    def num_bytes(self) -> int:
        """Of this implementation: tokens, order and rewards."""
        return sum(visit.tokens.nbytes + visit.order.nbytes + visit.rewards.nbytes for visit in self._visits.values())


class HistoSpecPaper(HistoSpec):
    """Additive increase, reset after a rejection."""

    def next_window(self, window: int, *, accepted: bool) -> int:
        """2, 4, 6, .. 32."""
        return min(window + 2, 32) if accepted else 2


class HistoSpecReleased(HistoSpec):
    """Doubling and halving."""

    by_reward = False
    least_share = 0.1

    def next_window(self, window: int, *, accepted: bool) -> int:
        """2, 4, 8, 16."""
        return min(2 * window, 16) if accepted else max(window // 2, 2)


@compiled
def _compare(tokens: TokenIds, position: int, text: TokenIds, size: int) -> int:
    """Sign of the order of the `size` tokens before `position` and at the end of `text`, nearest first."""
    for distance in range(1, size + 1):
        mine = tokens[position - distance] if position >= distance else -1
        other = text[len(text) - distance]
        if mine != other:
            return -1 if mine < other else 1
    return 0


@compiled
def _first(tokens: TokenIds, order: npt.NDArray[np.int32], text: TokenIds, size: int, least: int) -> int:
    """First place in `order` that does not compare below `least`."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if _compare(tokens, order[middle], text, size) < least:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _follow(
    tokens: TokenIds,
    order: npt.NDArray[np.int32],
    rewards: npt.NDArray[np.float64],
    text: TokenIds,
    by_reward: bool,
    least_share: float,
    chain: TokenIds,
    shares: npt.NDArray[np.float64],
) -> int:
    """Fill `chain` and the product of its shares; how many tokens there are."""
    places = order[:0].copy()
    for size in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        begin, end = _first(tokens, order, text, size, 0), _first(tokens, order, text, size, 1)
        places = order[begin:end].copy()
        if (tokens[places] >= 0).any():
            break
    count, share = len(places), 1.0
    for k in range(len(chain)):
        best, best_reward, best_count = -1, -np.inf, 0
        for i in range(count):
            token = tokens[places[i]]
            if token < 0 or token == best:
                continue
            reward, votes = 0.0, 0
            for j in range(count):
                if tokens[places[j]] == token:
                    reward += rewards[places[j]]
                    votes += 1
            ahead = reward > best_reward or (reward == best_reward and votes > best_count)
            if (by_reward and ahead) or (not by_reward and votes > best_count):
                best, best_reward, best_count = token, reward, votes
        if best < 0:
            return k
        share *= best_count / count
        if share < least_share:
            return k
        chain[k] = best
        shares[k] = share
        kept = 0
        for i in range(count):
            if tokens[places[i]] == best:
                places[kept] = places[i] + 1
                kept += 1
        count = kept
    return len(chain)
