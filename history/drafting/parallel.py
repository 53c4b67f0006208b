"""Drafts parts of a large batch in parallel threads.

`history.drafting.candidates` reads shared state and writes each row's own state, so a batch can be split by rows. Every
thread has its own scratch arrays. Kernels run without the interpreter's lock. Updates (`history.drafting.update`) stay
on one thread, because rows of a prompt share learned state.

Invariant: the drafts do not depend on the number of threads.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from history.drafting.candidates import propose
from history.drafting.state import DraftState, Floats, Longs, scratch_arrays
from history.types import TokenIds

LEAST_ROWS = 32
"""Fewest rows of a part, because waking a thread costs time. Chosen, not measured."""


class DraftThreads:
    """A pool of drafting threads that includes the caller's thread."""

    def __init__(self, num_threads: int, *, max_draft_tokens: int) -> None:
        """Create scratch arrays; threads start with the first batch that is large enough."""
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
        """Run `history.drafting.candidates.propose` on as many threads as the batch can use."""
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
