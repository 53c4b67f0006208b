"""`python -m tests.support.trainers.killed_save MODEL RUN_DIR`: a trainer that is killed while it writes a checkpoint.

It takes a step and completes the checkpoint of step 1. Then it takes another step and begins that of step 2. When the
first of two files is written, it kills itself (-9).
"""

import os
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from launcher.run_dir.checkpoints import Checkpoints
from megatron_rl.config import ParallelConfig
from tests.megatron_rl.trainer.test_trainer import ALGORITHMS, batch_for, trainer_spec
from tests.support.deadline import DEADLINE_S
from tests.support.trainers.saves import save

ALGORITHM = ALGORITHMS["one update"]


class FirstFileOnly(ThreadPoolExecutor):
    """A thread that, if asked to hold, writes the first file that it is given and no other."""

    def __init__(self) -> None:
        super().__init__(1)
        self.holds = False
        self.first: Future | None = None

    def submit(self, function, /, *args, **kwargs):
        if self.first is not None:
            super().submit(threading.Event().wait, DEADLINE_S)
        writing = super().submit(function, *args, **kwargs)
        if self.holds:
            self.first = self.first or writing
        return writing


def main(model: str, run_dir: str) -> None:
    from megatron_rl.cpu import shim

    shim.install()
    from megatron_rl.model import parallel
    from megatron_rl.trainer.trainer import Trainer

    torch.set_num_threads(1)
    single, checkpoints = ParallelConfig(), Checkpoints(Path(run_dir))
    store = torch.distributed.FileStore(f"{run_dir}/store", 1)
    position = parallel.initialize(single, rank=0, store=store, timeout_s=DEADLINE_S, seed=0)
    threads, batch = FirstFileOnly(), batch_for(single, ALGORITHM)
    trainer = Trainer(trainer_spec(Path(model), single, ALGORITHM), position, writers=threads)
    trainer.train(batch.of_rank(0), lambda refs: refs)
    save(trainer, str(checkpoints.begin(1) / "trainer"))
    checkpoints.finish(1, keep_last=2)
    trainer.train(batch.of_rank(0), lambda refs: refs)
    threads.holds = True
    trainer.begin_save(str(checkpoints.begin(2) / "trainer"), background=True)
    assert threads.first is not None
    threads.first.result()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
