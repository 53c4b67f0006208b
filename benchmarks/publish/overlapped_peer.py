"""A second peer of `benchmarks.publish`: one rank gathers BF16 buckets and sends them while engines quantise and load.

Gathering, sending, quantising and loading overlap: two buckets are in transfer, and an engine rank receives the next
bucket while it quantises the last one. Each rank is a process, and bytes travel over gloo, as in the product. Loading
is one copy of the codes; vLLM's repacking is left out, which favours the peer. The bucket size is the best of `SIZES`.
"""

import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file
from torch._C._distributed_c10d import TCPStore

from benchmarks.publish.cases import ENGINES, TRAINERS, Case
from benchmarks.publish.parts import TIMEOUT_S, ready_processes
from megatron_rl.quantization.backends import Quantizer, choose_backend
from megatron_rl.quantization.formats import CODE_FORMATS
from megatron_rl.weights.packer import CPU_BOX_SIZE, row_boxes
from rollout.transports.rendezvous import open_store
from rollout.weights.format import FP8_BLOCK
from rollout.weights.manifest import Box

SIZES = (4 << 20, 16 << 20, 64 << 20)
"""Bucket sizes, the best of which counts."""
NUM_TRAINERS, IN_TRANSFER = 2, 2

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One publish of the peer."""

    model: str
    format: str
    by_stage: bool
    """Whether the other trainer rank has the second half of all tensors, and not half of each."""
    num_ranks: int
    """Ranks of an engine."""
    world_size: int
    bucket_bytes: int
    port: int


class OverlappedPeer:
    """Measures publishes of one case, after a search for the best bucket size."""

    def __init__(self, model: Path, case: Case) -> None:
        self._model = model
        self._case = case
        self.bucket_bytes = 0
        """The best size; 0 before the first measurement."""

    def measure(self) -> float:
        """Seconds of a publish; the second of two counts, as for the product."""
        if not self.bucket_bytes:
            seconds = {size: self._second(size) for size in SIZES}
            self.bucket_bytes = min(seconds, key=lambda size: seconds[size])
        return self._second(self.bucket_bytes)

    def _second(self, bucket_bytes: int) -> float:
        num_engines, num_ranks = ENGINES[self._case.engines]
        by_stage = TRAINERS[self._case.trainer].pipeline > 1
        store = open_store(host="127.0.0.1", timeout_s=TIMEOUT_S)
        job = Job(
            model=str(self._model / "model.safetensors"),
            format=self._case.format,
            by_stage=by_stage,
            num_ranks=num_ranks,
            world_size=NUM_TRAINERS + num_engines * num_ranks,
            bucket_bytes=bucket_bytes,
            port=store.port,
        )
        context = ready_processes()
        results = context.Queue()
        processes = [context.Process(target=_rank, args=(job, rank, results)) for rank in range(job.world_size)]
        for process in processes:
            process.start()
        found = float(results.get(timeout=TIMEOUT_S))
        for process in processes:
            process.join()
        del store
        return found


def buckets(weights: Weights, bucket_bytes: int) -> Iterator[list[str]]:
    """Names of tensors, in order, in buckets of at most so many bytes; a larger tensor has a bucket of its own."""
    names: list[str] = []
    used = 0
    for name, weight in weights.items():
        if names and used + weight.nbytes > bucket_bytes:
            yield names
            names, used = [], 0
        names.append(name)
        used += weight.nbytes
    if names:
        yield names


def _rank(job: Job, rank: int, results: "multiprocessing.Queue[float]") -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", job.port, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size)
    weights = load_file(job.model)
    plan = list(buckets(weights, job.bucket_bytes))
    engine = None if rank < NUM_TRAINERS else Engine(job, rank - NUM_TRAINERS, weights)
    for turn in range(2):
        dist.barrier()
        began = time.perf_counter()
        if engine is not None:
            engine.receive(plan)
        elif rank == 0:
            _gather_and_send(job, weights, plan)
        else:
            _give(job, weights, plan)
        dist.barrier()
        if rank == 0 and turn:
            results.put(time.perf_counter() - began)
    dist.destroy_process_group()


def _lacks(job: Job, weights: Weights, name: str) -> tuple[int, int]:
    """First element and number of elements of a tensor that the gathering rank lacks."""
    names, size = list(weights), weights[name].numel()
    if job.by_stage:
        return (0, size) if names.index(name) >= len(names) // 2 else (0, 0)
    return (size // 2, size - size // 2) if weights[name].dim() == 2 else (0, 0)


def _give(job: Job, weights: Weights, plan: Sequence[Sequence[str]]) -> None:
    for names in plan:
        for name in names:
            first, count = _lacks(job, weights, name)
            if count:
                dist.send(weights[name].view(-1)[first : first + count], dst=0)


def _gather_and_send(job: Job, weights: Weights, plan: Sequence[Sequence[str]]) -> None:
    flights: list[list[dist.Work]] = []
    largest = max(sum(weights[name].numel() for name in names) for names in plan)
    spare = [torch.empty(largest, dtype=torch.bfloat16) for _ in range(IN_TRANSFER)]
    for number, names in enumerate(plan):
        if len(flights) == IN_TRANSFER:
            for work in flights.pop(0):
                work.wait()
        whole, end = spare[number % IN_TRANSFER], 0
        for name in names:
            weight = weights[name].view(-1)
            place = whole[end : end + weight.numel()]
            first, count = _lacks(job, weights, name)
            place[:first] = weight[:first]
            place[first + count :] = weight[first + count :]
            if count:
                dist.recv(place[first : first + count], src=1)
            end += weight.numel()
        sending = [dist.isend(whole[:end], dst=rank) for rank in range(NUM_TRAINERS, job.world_size)]
        flights.append([work for work in sending if work is not None])
    for works in flights:
        for work in works:
            work.wait()


class Engine:
    """An engine rank: receives all of every bucket, quantises its shard, and copies it to where it is used."""

    def __init__(self, job: Job, number: int, weights: Weights) -> None:
        self._job = job
        self._rank = number % job.num_ranks
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        format = CODE_FORMATS.get(job.format)
        backend = None if format is None else choose_backend(format, torch.device("cpu"), [torch.bfloat16])
        self._rule = None if format is None or backend is None else Quantizer(format=format, backend=backend)
        self._loaded = {name: torch.empty_like(self._load(name, weight)) for name, weight in weights.items()}

    def receive(self, plan: Sequence[Sequence[str]]) -> None:
        """Receive and load one publish."""
        ready: queue.Queue[torch.Tensor] = queue.Queue(maxsize=1)
        thread = threading.Thread(target=self._receive_all, args=(plan, ready), daemon=True)
        thread.start()
        for names in plan:
            bucket, end = ready.get(timeout=TIMEOUT_S), 0
            for name in names:
                weight = bucket[end : end + self._shapes[name].numel()].view(self._shapes[name])
                self._loaded[name].copy_(self._load(name, weight))
                end += weight.numel()
        thread.join()

    def _receive_all(self, plan: Sequence[Sequence[str]], ready: "queue.Queue[torch.Tensor]") -> None:
        for names in plan:
            bucket = torch.empty(sum(self._shapes[name].numel() for name in names), dtype=torch.bfloat16)
            dist.recv(bucket, src=0)
            ready.put(bucket)

    def _load(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor, as bytes in the engines' format."""
        part = weight.chunk(self._job.num_ranks)[self._rank] if weight.dim() == 2 else weight
        if self._rule is None or weight.dim() < 2 or ".layers." not in name:
            return part
        codes = torch.empty(part.shape, dtype=self._rule.format.dtype)
        for box in row_boxes(Box(start=(0, 0), shape=tuple(part.shape)), most=CPU_BOX_SIZE, multiple=FP8_BLOCK):
            rows = part[box.slices((0, 0))]
            factors = self._rule.factors(self._rule.amax(rows, box.start))
            self._rule.scales(factors)
            self._rule.codes(rows, factors, box.start, codes[box.slices((0, 0))])
        return codes
