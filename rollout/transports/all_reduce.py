"""A sum over nodes by gloo, and by NCCL where there are GPUs: a process of its own on each node, before a run starts.

    python -m rollout.transports.all_reduce RANK WORLD ADDRESS PORT TIMEOUT_S

Gloo's monitored barrier comes first: it names the ranks that the first rank does not hear from.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def all_reduce(rank: int, world: int, address: str, port: int, timeout_s: float) -> str:
    """Sum rank + 1 over `world` processes; returns the back ends that gave the right sum.

    Raises:
        RuntimeError: a process is missing, or a sum is wrong.
    """
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world, timeout=timeout)
    try:
        dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)
        names = ["gloo"]
        _sum(rank, world, torch.device("cpu"), None)
        if torch.cuda.is_available():
            names.append("nccl")
            _sum(rank, world, torch.device("cuda", 0), dist.new_group(backend="nccl", timeout=timeout))
        return f"a sum over {world} node(s) is right by {' and '.join(names)}"
    finally:
        dist.destroy_process_group()


def _sum(rank: int, world: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    number = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(number, group=group)
    expected = world * (world + 1) / 2
    if number.item() != expected:
        raise RuntimeError(f"the sum over {world} ranks on {device} is {number.item()}, not {expected}")


if __name__ == "__main__":
    print(all_reduce(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))
