"""HistoSpec (RhymeRL, arXiv 2508.18588), as its paper describes it and as its code was released.

Both match the last 7 tokens, backing off to 3, in the responses of the prompt's last visit, and draft the tokens that
follow there. Where continuations differ, one is chosen and the others are dropped.

* paper: the continuation with the higher sum of rewards. The draft window starts at 2, grows by 2 up to 32 after a
  fully accepted draft, and is 2 again after any rejection.
* released: the more frequent continuation, until the product of its shares falls below 0.1. The window doubles and
  halves within 2..16.

Neither states whether the end of the prompt is context for the start of a response. Here it is, which can only help
them. Ties of reward go to the more frequent continuation. A sorted list of positions replaces the suffix tree; the
drafts are the same. The paper gives no times to compare with.
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
    """Responses of a prompt's last visit in one array; a -1 and the prompt's last tokens precede each."""

    tokens: TokenIds
    """[n]"""
    order: npt.NDArray[np.int32]
    """[n] positions, sorted by the LONGEST tokens before them, nearest token first."""
    rewards: npt.NDArray[np.float64]
    """[n] reward of the response that contains a position."""


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
    """Base of both variants; subclasses set the window, the choice of a continuation and the end of a draft."""

    first_window = 2
    by_reward = True
    least_share = 0.0

    def __init__(self) -> None:
        self._visits: dict[str, Visit] = {}
        self._open: dict[int, tuple[Visit | None, int, list[int], int]] = {}
        self._num_requests = 0
        self.survivals: Sequence[Sequence[float]] = ()

    def next_window(self, window: int, *, accepted: bool) -> int:
        """The window after a draft; `accepted` if all its tokens were."""
        raise NotImplementedError

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None:
        """Replace the prompt's history."""
        self._visits[prompt_id] = index(visit)

    def open(self, trace: Trace, max_length: int) -> int:
        """Begin a request with the first window."""
        self._num_requests += 1
        self._open[self._num_requests] = self._visits.get(trace.prompt_id), self.first_window, [], 0
        return self._num_requests

    def close(self, draft_row: int) -> None:
        """Forget the request."""
        del self._open[draft_row]

    def propose(self, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Adapt the window to the last draft, then match and draft, row by row."""
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
        """Bytes of this implementation: tokens, order and rewards."""
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
        token = tokens[position - distance] if position >= distance else -1
        other = text[len(text) - distance]
        if token != other:
            return -1 if token < other else 1
    return 0


@compiled
def _first(tokens: TokenIds, order: npt.NDArray[np.int32], text: TokenIds, size: int, least: int) -> int:
    """First index of `order` whose comparison is at least `least`."""
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
    """Fill `chain` and `shares`, the product of its shares; returns the number of tokens."""
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
        remaining = 0
        for i in range(count):
            if tokens[places[i]] == best:
                places[remaining] = places[i] + 1
                remaining += 1
        count = remaining
    return len(chain)
