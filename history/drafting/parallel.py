"""Drafts parts of a large batch at once, each on a thread of its own.

`history.drafting.candidates` reads what all rows share and writes what is each row's own, so rows can be cut into
parts; what one part needs to work in is made once for every thread. Kernels run without the interpreter's lock.
Learning (`history.drafting.update`) stays on one thread: rows of a prompt share what they learn.

Invariant: drafts are those of one thread, whatever their number.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from history.drafting.candidates import propose
from history.drafting.state import DraftState, Floats, Longs, scratch_arrays
from history.types import TokenIds

LEAST_ROWS = 32
"""Of a part: a thread has to be woken for it. Chosen, not measured."""


class DraftThreads:
    """As many threads as one says, the caller's included."""

    def __init__(self, num_threads: int, *, max_draft_tokens: int) -> None:
        """Threads start when a batch is large enough for them."""
        if num_threads < 1:
            raise ValueError(f"{num_threads} threads cannot draft; at least 1 is needed")
        self._rooms = [scratch_arrays(max_draft_tokens) for _ in range(num_threads - 1)]
        self._pool: ThreadPoolExecutor | None = None

    def propose(
        self,
        state: DraftState,
        draft_rows: Longs,
        token_ids: TokenIds,
        num_tokens: TokenIds,
        rooms: TokenIds,
        drafts: TokenIds,
        survivals: Floats,
        available: TokenIds,
    ) -> None:
        """`history.drafting.candidates.propose`, on as many threads as the rows are worth."""
        num_parts = min(len(self._rooms) + 1, max(len(draft_rows) // LEAST_ROWS, 1))
        if num_parts == 1:
            propose(state, draft_rows, token_ids, num_tokens, rooms, drafts, survivals, available)
            return
        edges = np.linspace(0, len(draft_rows), num_parts + 1).astype(int).tolist()
        parts = [
            (
                draft_rows[begin:end],
                token_ids[begin:end],
                num_tokens[begin:end],
                rooms[begin:end],
                drafts[begin:end],
                survivals[begin:end],
                available[begin:end],
            )
            for begin, end in pairwise(edges)
        ]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self._rooms), thread_name_prefix="drafts")
        running = [
            self._pool.submit(propose, state._replace(**room), *part)
            for room, part in zip(self._rooms, parts[1:], strict=False)
        ]
        propose(state, *parts[0])
        for part in running:
            part.result()
