"""Collectives of torch over NCCL between processes, one on each device: `nccl_case NUM_RANKS`."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from tests.rehearsal.stages import stage


def rows(rank: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of a rank [4], on its device; no kernel computes them there."""
    return (torch.arange(4) + 10 * rank).to(dtype).to("cuda")


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected)


def sums(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        total = sum(rows(each, dtype=dtype).cpu() for each in range(size))
        found = rows(rank, dtype=dtype)
        dist.all_reduce(found)
        check(found, total)
        found = rows(rank, dtype=dtype)
        dist.reduce(found, 1)
        if rank == 1:
            check(found, total)
    found = rows(rank)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    check(found, rows(size - 1).cpu())
    parts = torch.stack([rows(rank).cpu() + each for each in range(size)]).cuda()
    part = torch.empty(4, device="cuda")
    dist.reduce_scatter_tensor(part, parts, op=dist.ReduceOp.AVG)
    check(part, torch.stack([rows(each).cpu() + rank for each in range(size)]).mean(0))


def copies(rank: int, size: int) -> None:
    found = rows(rank)
    dist.broadcast(found, 2)
    check(found, rows(2).cpu())
    gathered = torch.empty(size, 4, device="cuda")
    dist.all_gather_into_tensor(gathered, rows(rank))
    check(gathered, torch.stack([rows(each).cpu() for each in range(size)]))
    given = torch.stack([rows(rank).cpu() + 100 * each for each in range(size)]).cuda()
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    check(taken, torch.stack([rows(each).cpu() + 100 * rank for each in range(size)]))
    received = torch.empty(4, device="cuda")
    calls = [
        dist.P2POp(dist.isend, rows(rank), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for call in dist.batch_isend_irecv(calls):
        call.wait()
    check(received, rows((rank - 1) % size).cpu())


def subgroups(rank: int, size: int) -> None:
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    found = rows(rank)
    dist.all_reduce(found, group=pairs[rank // 2])
    first = rank // 2 * 2
    check(found, rows(first).cpu() + rows(first + 1).cpu())


PARTS = {"sums": sums, "copies": copies, "subgroups": subgroups}


def one_rank(rank: int, size: int, store: str, part: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    PARTS[part](rank, size)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # libraries wait for the driver at exit


def main(size: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            arguments = (int(size), str(Path(folder) / part), part)
            stage(part, lambda given=arguments: processes.spawn(one_rank, given, nprocs=given[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
