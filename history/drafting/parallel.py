"""Drafts parts of a large batch in parallel threads.

`history.drafting.candidates` reads shared state and writes each row's own state, so a batch can be split by rows. Every
thread has its own scratch arrays. Kernels run without the interpreter's lock. Updates (`history.drafting.update`) stay
on one thread, because rows of a prompt share learned state.

Invariant: the drafts do not depend on the number of threads.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from history.drafting.candidates import propose
from history.drafting.state import DraftState, Floats, Longs, scratch_arrays, table_of
from history.types import TokenIds

LEAST_ROWS = 32
"""Fewest rows of a part, because waking a thread costs time. Chosen, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRequests:
    """R rows of a batch, one running request each."""

    draft_rows: Longs
    """[R], -1 for a row without drafts."""
    token_ids: TokenIds
    """[B, L], B at least R: texts of prompt and output."""
    num_tokens: TokenIds
    """[R], tokens of each text, the newest included."""
    rooms: TokenIds
    """[R], most tokens to draft for each row."""

    @classmethod
    def of(cls, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> "DraftRequests":
        """Convert the arrays to the dtypes of the kernels: others would compile new kernels in the middle of a run."""
        return cls(
            draft_rows=np.asarray(draft_rows, dtype=np.int64),
            token_ids=np.ascontiguousarray(token_ids, dtype=np.int32),
            num_tokens=np.asarray(num_tokens, dtype=np.int32),
            rooms=np.asarray(rooms, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.draft_rows)

    def part(self, begin: int, end: int) -> "DraftRequests":
        """View rows begin..end."""
        return DraftRequests(
            draft_rows=self.draft_rows[begin:end],
            token_ids=self.token_ids[begin:end],
            num_tokens=self.num_tokens[begin:end],
            rooms=self.rooms[begin:end],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestCandidates:
    """The best candidate of each of R rows."""

    tokens: TokenIds
    """[R, K]"""
    survivals: Floats
    """[R, K]: probability that a token and all before it are accepted."""
    available: TokenIds
    """[R]: tokens of each candidate, at most K."""

    @classmethod
    def empty(cls, num_rows: int, max_draft_tokens: int) -> "BestCandidates":
        """Allocate the arrays for `num_rows` rows of at most `max_draft_tokens` tokens, not initialised."""
        return cls(
            tokens=np.empty((num_rows, max_draft_tokens), dtype=np.int32),
            survivals=np.empty((num_rows, max_draft_tokens), dtype=np.float32),
            available=np.empty(num_rows, dtype=np.int32),
        )

    def part(self, begin: int, end: int) -> "BestCandidates":
        """View rows begin..end."""
        return BestCandidates(
            tokens=self.tokens[begin:end], survivals=self.survivals[begin:end], available=self.available[begin:end]
        )


class DraftThreads:
    """A pool of drafting threads that includes the caller's thread."""

    def __init__(self, num_threads: int, *, max_draft_tokens: int) -> None:
        """Create scratch arrays; threads start with the first batch that is large enough."""
        if num_threads < 1:
            raise ValueError(f"{num_threads} threads cannot draft; at least 1 is needed")
        self._max_draft_tokens = max_draft_tokens
        self._scratch = [scratch_arrays(max_draft_tokens) for _ in range(num_threads - 1)]
        self._pool: ThreadPoolExecutor | None = None

    def propose(self, state: DraftState, table: Longs, requests: DraftRequests) -> BestCandidates:
        """Run `history.drafting.candidates.propose` on as many threads as the batch can use.

        `table` is that of `state`.
        """
        best = BestCandidates.empty(len(requests), self._max_draft_tokens)
        num_parts = min(len(self._scratch) + 1, max(len(requests) // LEAST_ROWS, 1))
        if num_parts == 1:
            _propose(table, requests, best)
            return best
        edges = np.linspace(0, len(requests), num_parts + 1).astype(int).tolist()
        parts = [(requests.part(begin, end), best.part(begin, end)) for begin, end in pairwise(edges)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self._scratch), thread_name_prefix="drafts")
        running = [
            self._pool.submit(_propose, table_of(state._replace(**scratch)), *part)
            for scratch, part in zip(self._scratch, parts[1:], strict=False)
        ]
        _propose(table, *parts[0])
        for part_done in running:
            part_done.result()
        return best


def _propose(table: Longs, requests: DraftRequests, best: BestCandidates) -> None:
    propose(
        table,
        requests.draft_rows,
        requests.token_ids,
        requests.num_tokens,
        requests.rooms,
        best.tokens,
        best.survivals,
        best.available,
    )
