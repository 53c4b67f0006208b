"""Parts of a publish, measured one by one: memory peaks, bytes over a transport, gathering and quantising BF16."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import TCPStore

from megatron_rl.model.spec import read_model_spec
from megatron_rl.quantization.backends import Quantizer, choose_backend
from megatron_rl.quantization.formats import CODE_FORMATS
from megatron_rl.weights.packer import CPU_BOX_SIZE, row_boxes
from megatron_rl.weights.reshard_plan import ReshardPlan, wire_tensors
from rollout.transports import shm
from rollout.transports import shm_files as segments
from rollout.transports import streaming as process_group
from rollout.transports.base import GroupChannel, Inbox, Sender, StoreAddress, chain
from rollout.transports.rendezvous import open_store
from rollout.transports.store_server import StoreServer
from rollout.types import WeightVersion
from rollout.weights.format import FP8_BLOCK, WeightFormat
from rollout.weights.manifest import Box, WeightManifest

RUN_ID = "publishbenchmark"
TIMEOUT_S = 300.0
NUM_LAYERS, QUICK_LAYERS = 32, 2
HIDDEN, HEAD_DIM = 1024, 64
VERSION = WeightVersion(0)


def write_model(directory: Path, *, quick: bool, num_layers: int = NUM_LAYERS, hidden: int = HIDDEN) -> Path:
    """Write a Hugging Face directory with random BF16 weights, by default half a billion."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": QUICK_LAYERS if quick else num_layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM // 4,
        "head_dim": HEAD_DIM,
        "intermediate_size": 4 * hidden,
        "vocab_size": 32768,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random = torch.Generator().manual_seed(0)
    weights = {
        tensor.name: (torch.randn(tensor.shape, generator=random) * 0.02).to(torch.bfloat16)
        for tensor in wire_tensors(read_model_spec(directory), WeightFormat(name="bf16"))
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@contextmanager
def peak_extra(titles: Mapping[str, str]) -> Iterator[dict[str, float]]:
    """Measure, by role, the largest growth of a process's resident bytes while the context is open.

    `titles` maps a role to the prefix of its processes' titles. Shared memory counts in every process that maps it. The
    yielded dict is filled on exit.
    """
    watched = [(role, process.pid, process.memory_info().rss) for role, process in _processes(titles)]
    for _, pid, _ in watched:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the kernel's record of the peak
    peaks: dict[str, float] = {}
    yield peaks
    for role, pid, before in watched:
        peak = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]
        key = f"peak_extra_bytes/{role}"
        peaks[key] = max(peaks.get(key, 0.0), float(int(peak) * 1024 - before))


@contextmanager
def asleep(titles: Mapping[str, str]) -> Iterator[None]:
    """Stop the processes with these titles (as for `peak_extra`) while the context is open."""
    stopped = [process for _, process in _processes(titles)]
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            process.resume()


def _processes(titles: Mapping[str, str]) -> list[tuple[str, psutil.Process]]:
    """Descendants of this process with a role."""
    return [
        (role, process)
        for process in psutil.Process().children(recursive=True)
        for role, title in titles.items()
        if (process.cmdline() or [""])[0].startswith(title)
    ]


@contextmanager
def exact_memory() -> Iterator[None]:
    """Processes started in this context return every freed block above 1 MiB to the system at once.

    Otherwise glibc keeps freed blocks, and resident memory says little about needed memory. It makes processes slower.
    """
    settings = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 20))
    os.environ |= settings
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def ready_processes() -> ForkServerContext:
    """A context whose processes are forked from a server that has imported all modules, since importing takes long.

    Forked processes allocate their buffers themselves, as spawned ones do.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


# -- bytes over a transport ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Senders, receivers and transport of a plan's buckets."""

    manifest: WeightManifest
    source_ranks: tuple[int, ...]
    num_engines: int
    num_ranks: int
    """Ranks per engine."""
    transport: str
    """`shm` or `gloo`."""
    plain: bool
    """Whether checksums are left out."""
    folder: str
    """Folder in shared memory in which senders write the paths of their segments."""
    stores: tuple[StoreAddress, ...]
    """Each engine's store."""

    @property
    def world_size(self) -> int:
        """Number of processes: senders, then engine ranks."""
        return len(self.source_ranks) + self.num_engines * self.num_ranks

    def channel(self, engine: int) -> GroupChannel:
        """Channel of one engine in the chain of all engines."""
        return chain(
            dict(enumerate(self.stores)),
            order=range(self.num_engines),
            source_ranks=self.source_ranks,
            num_engine_ranks=self.num_ranks,
            timeout_s=TIMEOUT_S,
        )[engine]


def transfer_s(plan: ReshardPlan, *, num_engines: int, num_ranks: int, transport: str, plain: bool) -> float:
    """Seconds to send all buckets of a plan from its source ranks to every engine rank that requires them.

    The product's transport sends from the sender's memory into newly allocated memory, until the last checksum is
    verified; with `plain` there are no checksums. Nothing is quantised or loaded. Every rank is a process.
    """
    stores = [StoreServer("127.0.0.1") for _ in range(num_engines)]
    with TemporaryDirectory(dir=segments.SHM) as folder:
        route = Route(
            manifest=plan.manifest(RUN_ID, VERSION),
            source_ranks=plan.source_ranks,
            num_engines=num_engines,
            num_ranks=num_ranks,
            transport=transport,
            plain=plain,
            folder=folder,
            stores=tuple(store.address for store in stores),
        )
        context = ready_processes()
        meet = context.Barrier(route.world_size + 1, timeout=TIMEOUT_S)
        jobs = [context.Process(target=_rank, args=(route, rank, meet)) for rank in range(route.world_size)]
        for job in jobs:
            job.start()
        meet.wait()  # all ranks have started
        began = time.perf_counter()
        meet.wait()  # shared memory: all buckets are staged
        meet.wait()  # all buckets have arrived
        seconds = time.perf_counter() - began
        for job in jobs:
            job.join()
    return seconds


def _rank(route: Route, number: int, meet: Barrier) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if route.plain:
        for module in (process_group, shm):
            module.seal = module.verify = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    if number < len(route.source_ranks):
        _send(route, route.source_ranks[number], meet)
    else:
        _receive(route, *divmod(number - len(route.source_ranks), route.num_ranks), meet)


def _send(route: Route, rank: int, meet: Barrier) -> None:
    buckets = [bucket for bucket in route.manifest.buckets if bucket.source_rank == rank]
    payload = torch.randint(0, 256, (max(bucket.num_bytes for bucket in buckets),), dtype=torch.uint8)
    sender: Sender = shm.ShmSender(run_id=RUN_ID, rank=rank)
    if route.transport == "gloo":
        sender = streaming = process_group.GroupSender(run_id=RUN_ID, rank=rank, timeout_s=TIMEOUT_S)
        streaming.attach(0, route.channel(0))
    meet.wait()
    if route.transport == "gloo":
        meet.wait()
    sender.open(VERSION, buckets)
    for bucket in buckets:
        sender.buffer(bucket.index).copy_(payload[: bucket.num_bytes])
        sender.commit(bucket.index)
    path = sender.finish()
    if route.transport == "shm":
        Path(route.folder, str(rank)).write_text(path, encoding="utf-8")
        meet.wait()
    meet.wait()
    sender.abandon()


def _receive(route: Route, engine: int, rank: int, meet: Barrier) -> None:
    buckets = [bucket for bucket in route.manifest.buckets if bucket.required_by(rank)]
    streaming = process_group.GroupInbox(route.channel(engine), engine_rank=rank) if route.transport == "gloo" else None
    meet.wait()
    meet.wait()
    if streaming is not None:
        streaming.expect(route.manifest, timeout_s=TIMEOUT_S)
        inbox: Inbox = streaming
    else:
        paths = {source: Path(route.folder, str(source)) for source in route.source_ranks}
        segments = {source: path.read_text(encoding="utf-8") for source, path in paths.items()}
        inbox = shm.ShmInbox(route.manifest, segments, engine_rank=rank)
    for bucket in buckets:
        inbox.take(bucket).clone()  # a copy, as the loader makes one
    meet.wait()


# -- the peer's way ------------------------------------------------------------------------------------


def gather_s(model: Path, *, by_stage: bool) -> float:
    """Seconds in which the first of two ranks receives the other rank's BF16 weights, tensor by tensor.

    The other rank has half of every matrix or, with `by_stage`, the second half of all weights. Peers with pipeline
    stages gather them too before they send (verl, `megatron_utils.broadcast_from_megatron_pp`, even on all stages).
    """
    store = open_store(host="127.0.0.1", timeout_s=TIMEOUT_S)
    context = ready_processes()
    results = context.Queue()
    jobs = [
        context.Process(target=_gather, args=(str(model), store.port, rank, by_stage, results)) for rank in range(2)
    ]
    for job in jobs:
        job.start()
    seconds = float(results.get(timeout=TIMEOUT_S))
    for job in jobs:
        job.join()
    del store
    return seconds


def _gather(model: str, port: int, rank: int, by_stage: bool, results: "multiprocessing.Queue[float]") -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=TCPStore("127.0.0.1", port, None, is_master=False), rank=rank, world_size=2)
    weights = [weight for weight in load_file(Path(model) / "model.safetensors").values() if weight.dim() == 2]
    # tensor parallel: half of every matrix is gathered; pipeline parallel: half of the matrices
    parts = weights[len(weights) // 2 :] if by_stage else [weight.chunk(2)[rank].contiguous() for weight in weights]
    dist.barrier()
    began = time.perf_counter()
    for part in parts:
        if by_stage and rank == 0:
            dist.recv(torch.empty_like(part), src=1)
        elif by_stage:
            dist.send(part, dst=0)
        else:
            dist.gather(part, [torch.empty_like(part) for _ in range(2)] if rank == 0 else None)
    dist.barrier()
    if rank == 0:
        results.put(time.perf_counter() - began)
    dist.destroy_process_group()


def quantise_s(model: Path, format: str, *, num_engines: int, num_ranks: int) -> float:
    """Seconds in which all engine ranks of a peer quantise their shards of the layers; each rank is a process."""
    if format not in CODE_FORMATS:
        return 0.0
    context = ready_processes()
    meet, results = context.Barrier(num_engines * num_ranks, timeout=TIMEOUT_S), context.Queue()
    jobs = [
        context.Process(target=_quantise, args=(str(model), format, rank, num_ranks, meet, results))
        for _ in range(num_engines)
        for rank in range(num_ranks)
    ]
    for job in jobs:
        job.start()
    seconds = max(float(results.get(timeout=TIMEOUT_S)) for _ in jobs)
    for job in jobs:
        job.join()
    return seconds


def _quantise(
    model: str, format: str, rank: int, num_ranks: int, meet: Barrier, results: "multiprocessing.Queue[float]"
) -> None:
    torch.set_num_threads(1)
    code_format = CODE_FORMATS[format]
    backend = choose_backend(code_format, torch.device("cpu"), [torch.bfloat16])
    rule = Quantizer(format=code_format, backend=backend)
    shards = [
        weight.chunk(num_ranks)[rank].clone()
        for name, weight in load_file(Path(model) / "model.safetensors").items()
        if ".layers." in name and weight.dim() == 2
    ]
    some = shards[0][:FP8_BLOCK]  # compiles the kernels before the clock starts
    rule.codes(some, rule.factors(rule.amax(some, (0, 0))), (0, 0))
    meet.wait()
    began = time.perf_counter()
    for shard in shards:
        # in boxes of rows, as trainers do: faster than whole matrices
        for box in row_boxes(Box(start=(0, 0), shape=tuple(shard.shape)), most=CPU_BOX_SIZE, multiple=FP8_BLOCK):
            part = shard[box.slices((0, 0))]
            factors = rule.factors(rule.amax(part, box.start))
            rule.scales(factors)
            rule.codes(part, factors, box.start)
    results.put(time.perf_counter() - began)
