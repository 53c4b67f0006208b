"""Searches the drafts of a large batch in parallel threads.

`history.drafting.candidates` reads shared state and writes each row's own state, so a batch can be split by rows. Every
thread has its own scratch arrays. Kernels run without the interpreter's lock. Updates (`history.drafting.update`) stay
on one thread, because rows of a prompt share learned state.

Invariant: the drafts do not depend on the number of threads.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from history.drafting.state import DraftState, Longs, scratch_arrays, table_of

LEAST_ROWS = 32
"""Fewest rows of a part, because waking a thread costs time. Chosen, not measured."""


class DraftThreads:
    """A pool of drafting threads that includes the caller's thread."""

    def __init__(self, num_threads: int, *, max_draft_tokens: int) -> None:
        """Create scratch arrays; threads start with the first batch that is large enough."""
        if num_threads < 1:
            raise ValueError(f"{num_threads} threads cannot draft; at least 1 is needed")
        self._scratch = [scratch_arrays(max_draft_tokens) for _ in range(num_threads - 1)]
        self._pool: ThreadPoolExecutor | None = None

    def tables(self, state: DraftState) -> list[Longs]:
        """The table of a state for each thread, with the thread's scratch arrays; the caller's comes first."""
        return [table_of(state), *(table_of(state._replace(**scratch)) for scratch in self._scratch)]

    def num_parts(self, num_rows: int) -> int:
        """Number of threads that a batch can use."""
        return min(len(self._scratch) + 1, max(num_rows // LEAST_ROWS, 1))

    def run(self, search: Callable[[int, int, int], object], num_rows: int) -> None:
        """Call `search` with a part and the range of its rows, on as many threads as the batch can use."""
        num_parts = self.num_parts(num_rows)
        edges = [num_rows * part // num_parts for part in range(num_parts + 1)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self._scratch), thread_name_prefix="drafts")
        running = [self._pool.submit(search, part, edges[part], edges[part + 1]) for part in range(1, num_parts)]
        search(0, edges[0], edges[1])
        for part_done in running:
            part_done.result()
