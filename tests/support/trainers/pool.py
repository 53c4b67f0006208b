"""Four trainer ranks without Ray: spawned once per pytest session, re-partitioned for every test.

`pool.run(function, *arguments, parallel=...)` calls `function(position, parallel, *arguments)` on ranks
0..n-1, all at once, in a world of n ranks joined for this call (kept while the partition stays the same),
and returns their results in rank order. Functions and values travel by pickle.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_rl.config import ParallelConfig
from tests.support.deadline import DEADLINE_S

NUM_RANKS = 4


def _serve(connection: Connection, rank: int) -> None:
    import torch

    from megatron_rl.cpu import shim

    torch.set_num_threads(1)
    shim.install()
    from megatron_rl.model import parallel as ranks

    joined = None
    num_modules = 0
    while (order := connection.recv()) is not None:
        function, arguments, parallel, store = order
        try:
            if joined != (parallel, store):
                if joined is not None:
                    ranks.destroy()
                joined = None
                # trainers refer to themselves, and keep their groups' threads, dozens, that wake up all the time
                _forget_graphs()
                gc.collect()
                if len(sys.modules) > num_modules:
                    # neither these collections nor those of Megatron's checkpoints scan the imported modules again
                    gc.freeze()
                    num_modules = len(sys.modules)
                position = ranks.initialize(
                    parallel,
                    rank=rank,
                    store=torch.distributed.FileStore(str(store), parallel.world_size),
                    timeout_s=DEADLINE_S,
                    seed=0,
                )
                joined = (parallel, store)
            connection.send((True, function(position, parallel, *arguments)))
        except Exception:  # process border: the parent raises it again with the rank's name
            connection.send((False, traceback.format_exc()))


def _forget_graphs() -> None:
    """Dispatchers of experts hold the graph of the last forward, in which the collector does not find the model."""
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    for found in gc.get_objects():
        if issubclass(type(found), MoETokenDispatcher):
            vars(found).clear()


class RankPool:
    """Owns the processes; `close` ends them."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._stores = tempfile.TemporaryDirectory()
        self._worlds = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._last = None
        self._connections, self._processes = [], []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=False)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function, *arguments, parallel=None):
        """Results of `function` on every rank of `parallel`, in rank order.

        Raises RuntimeError with the tracebacks of the ranks that failed, TimeoutError naming the one that is late.
        """
        parallel = parallel or ParallelConfig()
        if self._last is None or self._last[0] != parallel:
            self._worlds += 1
            self._last = (parallel, str(Path(self._stores.name) / f"world{self._worlds}"))
        connections = self._connections[: parallel.world_size]
        for connection in connections:
            connection.send((function, arguments, *self._last))
        results, failures = [], []
        for rank, connection in enumerate(connections):
            succeeded, result = self._answer(rank, connection, function.__name__)
            (results if succeeded else failures).append(result if succeeded else f"rank {rank}: {result}")
        if failures:
            self._last = None
            raise RuntimeError("\n".join(failures))
        return results

    def _answer(self, rank, connection, what):
        if connection.poll(DEADLINE_S):
            return connection.recv()
        self._end(wait_s=0)
        self._start()
        raise TimeoutError(f"rank {rank} has not answered {what} within {DEADLINE_S} s; the pool was started anew")

    def _end(self, *, wait_s) -> None:
        for process in self._processes:
            process.join(wait_s)
            if process.is_alive():
                process.kill()
                process.join()

    def close(self) -> None:
        """Let the ranks end by themselves, so that processes that they started (checkpoint managers) end too."""
        for connection in self._connections:
            connection.send(None)
        self._end(wait_s=20)
        self._stores.cleanup()
