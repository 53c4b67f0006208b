"""Trainer ranks publish to engine ranks, every rank in a process of its own: `ranks_case FAMILY WAY`.

WAY is `colocated`, where engine ranks map memory of the trainer rank on their device, or `chain`, where two engines on
devices of their own pass buckets on. Two trainer ranks share each layer (tensor parallelism). Every engine rank
requires boxes of which the other trainer rank holds a part, and compares what arrives with the directory's bytes.
"""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from rollout.processes import ProcessEnv

os.environ.update(ProcessEnv(single_node=True).trainer_rank(threads=1))
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # `trainer_case` compiles; here every process would

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from safetensors.torch import load_file, save_file

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import read_model_spec
from megatron_rl.trainer.messages import TrainerSpec
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard
from rollout.transports.base import GroupChannel, Sender, chain
from rollout.transports.colocated import ColocatedInbox
from rollout.transports.prefetch import Prefetch
from rollout.transports.store_server import StoreServer
from rollout.transports.streaming import GroupInbox, GroupSender
from rollout.types import WeightVersion
from rollout.weights.manifest import Box, Required
from rollout.worker.received_pieces import ReceivedPieces
from tests.rehearsal.stages import stage
from tests.support.engines.packing import stacked

RANKS = 2
"""Of the trainer, and of each engine."""
PARALLEL = ParallelConfig(tensor=RANKS)
TIMEOUT_S = 900
VERSIONS = ("first", "second")
"""Directories of the weights of each publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all processes know."""

    folder: Path
    spec: TrainerSpec
    required: tuple[Required, ...]
    channels: Mapping[int, GroupChannel]
    """Of each engine of a chain; empty for colocated ranks."""
    addresses: "tuple[processes.SimpleQueue, ...]"
    """By engine rank: where its trainer rank shows each publish."""
    taken: "tuple[processes.SimpleQueue, ...]"
    """By trainer rank: an engine rank has read a publish."""

    def plan(self) -> ReshardPlan:
        """The plan that the trainer makes."""
        return plan_reshard(
            read_model_spec(Path(self.spec.model)),
            PARALLEL,
            format=self.spec.format,
            bucket_bytes=self.spec.publish.bucket_bytes,
            uses_te_layer_names=True,
            required=self.required,
        )


def halves(tensors: Mapping[str, torch.Tensor], rank: int) -> Required:
    """The rows of the other half of every matrix, and vectors whole."""
    found: dict[str, tuple[Box, ...]] = {}
    for name, tensor in tensors.items():
        rows = tensor.shape[-2] // 2 if tensor.dim() > 1 else tensor.shape[0]
        first = (1 - rank) * rows if tensor.dim() > 1 else 0
        starts = [(expert, first, 0) for expert in range(tensor.shape[0])] if tensor.dim() == 3 else [(first, 0)]
        shape = (1,) * (tensor.dim() - 2) + (rows, *tensor.shape[-1:])
        found[name] = tuple(Box(start=start[: tensor.dim()], shape=shape[: tensor.dim()]) for start in starts)
    return found


def trainer_rank(rank: int, setup: Setup) -> None:
    # here, because engine ranks import this file without Megatron
    from megatron_rl.model import parallel
    from megatron_rl.trainer.trainer import Trainer
    from megatron_rl.weights import hf_load
    from tests.rehearsal.trainer_case import ONE, check_equal, train
    from tests.support.trainers.saves import save

    store = dist.FileStore(str(setup.folder / "store"), RANKS)
    position = parallel.initialize(PARALLEL, rank=rank, store=store, timeout_s=TIMEOUT_S, seed=0)
    trainer = Trainer(setup.spec, position)
    trainer.plan_publishes(setup.required)
    assert trainer.publishes.plan == setup.plan()
    sender = sender_of(setup, rank, trainer.publishes.plan)
    for version, name in enumerate(VERSIONS):
        hf_load.load(trainer._model, trainer._held, trainer._model_spec, setup.folder / name)
        train(trainer, ONE)
        path = trainer.stage(WeightVersion(version), sender).path
        assert not sender.fault, sender.fault
        if setup.addresses:
            setup.addresses[rank].put(path)
            setup.taken[rank].get()
            sender.abandon()
    save(trainer, str(setup.folder / "saved"))
    trainer.load(str(setup.folder / "saved"))
    trainer.export(str(setup.folder / "exported"))
    if rank == 0:
        check_equal(*(load_file(setup.folder / name / "model.safetensors") for name in ("exported", VERSIONS[-1])))


def sender_of(setup: Setup, rank: int, plan: ReshardPlan) -> Sender:
    if setup.channels:
        sender = GroupSender(run_id="rehearsal", rank=rank, backend="nccl", timeout_s=TIMEOUT_S)
        sender.attach(0, setup.channels[0])
        return sender
    from rollout.transports.colocated import ColocatedSender
    from rollout.transports.cuda_ipc import CudaRegion

    return ColocatedSender(
        CudaRegion(),
        dist.new_group([0, 1], backend="nccl"),
        run_id="rehearsal",
        rank=rank,
        hosted=[[0], [1]],
        buckets=plan.buckets,
        backend="nccl",
        timeout_s=TIMEOUT_S,
    )


def engine_rank(engine: int, rank: int, setup: Setup) -> None:
    plan = setup.plan()
    inbox = GroupInbox(setup.channels[engine], engine_rank=rank) if setup.channels else None
    for version, name in enumerate(VERSIONS):
        manifest = plan.manifest("rehearsal", WeightVersion(version))
        manifest.check_required(rank, setup.required[rank])
        expected = stacked(load_file(setup.folder / name / "model.safetensors"))
        if inbox is None:
            from rollout.transports.cuda_ipc import map_cuda

            memory = map_cuda(setup.addresses[rank].get())
            reader = ColocatedInbox(manifest, memory, engine_rank=rank, shared_with=[rank])
        else:
            inbox.expect(manifest, timeout_s=TIMEOUT_S)
            reader = Prefetch(inbox, [bucket for bucket in manifest.buckets if bucket.required_by(rank)])
        received = ReceivedPieces(manifest, reader, engine_rank=rank)
        for tensor, boxes in setup.required[rank].items():
            for box in boxes:
                # joining pieces of a box is a kernel's work
                for common, part in received.views(tensor, box):
                    assert part.is_cuda, f"{tensor} left the device"
                    right = expected[tensor][common.slices((0,) * len(common.start))]
                    assert torch.equal(part.cpu().view(torch.int16), right.view(torch.int16)), (
                        f"engine {engine} rank {rank}, publish {version}: other bytes of {tensor}, {common}"
                    )
        if inbox is None:
            setup.taken[rank].put(version)


def on_device(number: int, job: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """A process on a device of its own, which ends without the libraries' own exits."""
    torch.cuda.set_device(number)
    try:
        job(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # libraries wait for the driver at exit


def publish(setup: Setup) -> None:
    """Run all processes to their end."""
    jobs = [(rank, trainer_rank, (rank, setup)) for rank in range(RANKS)]
    for engine in range(len(setup.channels) or 1):
        first = RANKS * (1 + engine) if setup.channels else 0
        jobs += [(first + rank, engine_rank, (engine, rank, setup)) for rank in range(RANKS)]
    context = processes.get_context("spawn")
    started = [context.Process(target=on_device, args=job) for job in jobs]
    for process in started:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.exitcode is None for process in started) and time.monotonic() < deadline:
        wait([process.sentinel for process in started if process.exitcode is None], timeout=1)
        if any(process.exitcode for process in started):
            break  # the others wait for it
    wrong = [
        (job.__name__, arguments[:-1], process.exitcode)
        for (_, job, arguments), process in zip(jobs, started, strict=True)
        if process.exitcode != 0
    ]
    for process in started:
        process.kill()
    assert not wrong, f"processes with their exit codes: {wrong}"


def setup_of(family: str, way: str, folder: Path, stores: list[StoreServer]) -> Setup:
    from tests.rehearsal.trainer_case import ONE, trainer_spec
    from tests.support.trainers.tiny_megatron_models import save_model

    first, second = (folder / name for name in VERSIONS)
    save_model(family, first, dtype=torch.bfloat16)
    tensors = load_file(first / "model.safetensors")
    save_model(family, second, dtype=torch.bfloat16)
    save_file({name: -tensor for name, tensor in tensors.items()}, second / "model.safetensors", {"format": "pt"})
    spec = trainer_spec(first, PARALLEL, ONE, distributed=True)
    whole = stacked(tensors)
    context = processes.get_context("spawn")
    # simple ones, because a process that has put something may end at once
    queues = [context.SimpleQueue() for _ in range(2 * RANKS)] if way == "colocated" else []
    return Setup(
        folder=folder,
        spec=replace(spec, config=spec.config.model_copy(update={"dtype": "bf16"})),
        required=tuple(halves(whole, rank) for rank in range(RANKS)),
        channels=chain(
            {engine: store.address for engine, store in enumerate(stores)},
            order=range(len(stores)),
            source_ranks=tuple(range(RANKS)),
            num_engine_ranks=RANKS,
            timeout_s=TIMEOUT_S,
            backend="nccl",
        ),
        addresses=tuple(queues[:RANKS]),
        taken=tuple(queues[RANKS:]),
    )


def main(family: str, way: str) -> None:
    stores = [StoreServer("127.0.0.1") for _ in range(2 if way == "chain" else 0)]
    with tempfile.TemporaryDirectory() as name:
        setup = stage("two models", lambda: setup_of(family, way, Path(name), stores))
        if setup is not None:
            stage("two updates, publishes, a save and an export", lambda: publish(setup))


if __name__ == "__main__":
    main(*sys.argv[1:])
