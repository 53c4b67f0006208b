"""Regions in the memory of a CUDA device are freed whatever becomes of the processes that map them."""

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from rollout.types import WeightVersion
from tests.support.deadline import DEADLINE_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_BYTES = 32 << 20
DIED = 7
"""Exit code of a reader that dies."""


def content(version: int) -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(version))


def _obey(pipe: Connection) -> None:
    """Another process on the same device, which maps, releases, or dies, as it is told."""
    from rollout.transports.cuda_ipc import map_cuda

    memory = None
    while (order := pipe.recv()) is not None:
        match order:
            case "release":
                memory = None
            case "die":
                os._exit(DIED)
            case (version, address):
                memory = map_cuda(address)
                assert torch.equal(memory.cpu(), content(version))
        pipe.send("done")


class Reader:
    """A process on this device."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self.process = context.Process(target=_obey, args=(end,), daemon=True)
        self.process.start()
        end.close()

    def do(self, order: str | tuple[int, str]) -> None:
        """Returns when it is done; raises if the reader has failed."""
        self._pipe.send(order)
        assert self._pipe.poll(DEADLINE_S) and self._pipe.recv() == "done"

    def die(self) -> None:
        self._pipe.send("die")
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == DIED

    def end(self) -> None:
        self._pipe.send(None)
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == 0


@pytest.fixture
def readers() -> Iterator[tuple[Reader, Reader]]:
    both = Reader(), Reader()
    yield both
    for reader in both:
        reader.process.kill()
        reader.process.join(DEADLINE_S)


def in_use() -> tuple[int, int]:
    """Bytes of tensors, and bytes that torch keeps from other processes."""
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_the_memory_of_a_region_is_given_back_whatever_becomes_of_its_readers(readers):
    from rollout.transports.cuda_ipc import CudaRegion

    lives, dies = readers
    torch.cuda.empty_cache()
    before = in_use()
    region = CudaRegion()

    def show(version: int) -> tuple[int, str]:
        region.reserve(WeightVersion(version), NUM_BYTES).copy_(content(version))
        assert torch.cuda.memory_allocated() >= before[0] + NUM_BYTES
        return version, region.show()

    shown = show(0)
    for reader in readers:
        reader.do(shown)
    for reader in readers:
        reader.do("release")
    region.remove()
    assert in_use() == before

    show(1)  # to nobody
    region.remove()
    assert in_use() == before

    shown = show(2)
    for reader in readers:
        reader.do(shown)
    dies.die()
    lives.do("release")
    region.remove()
    assert in_use() == before

    region.reserve(WeightVersion(3), NUM_BYTES)  # and never shown
    region.remove()
    assert in_use() == before

    lives.do(show(4))
    lives.do("release")
    lives.end()
    region.remove()
    assert in_use() == before
