"""A trainer rank as a Ray actor: joins the process group, then forwards every call to `Trainer`.

Importing this module is cheap: `join` imports torch and Megatron in the actor's process, after the CPU shim.
"""

import gc
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from history.patience import NEVER
from megatron_rl.batching.batch import RankBatch
from megatron_rl.batching.sft_batch import SftBatch
from megatron_rl.trainer.messages import ProbeResult, StagedWeights, StepResult, TrainerProof, TrainerSpec
from rollout import progress
from rollout.data.sft_rows import SftRows
from rollout.failures import DeadlineError
from rollout.processes import ProcessId, given_devices, no_collection, redirect_output, write_stacks_on_signal
from rollout.transports.base import Backend, GroupChannel, Memory, StoreAddress
from rollout.transports.shm_files import sweep
from rollout.types import ColumnsRef, GroupColumns, WeightVersion
from rollout.weights.manifest import Required

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroup

    from megatron_rl.trainer.offload import Part
    from megatron_rl.trainer.saves import SavedPolicy
    from megatron_rl.trainer.trainer import Trainer
    from rollout.transports.base import Sender
    from rollout.transports.store_server import StoreServer


class TrainerActor:
    """One trainer rank in a process of its own."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        from megatron_rl.cpu import shim

        redirect_output()
        write_stacks_on_signal()
        progress.open_page()
        sweep()  # a trainer before this one may have been killed in a publish, on a node that only its ranks use
        shim.install()
        self._spec = spec
        self._rank = rank
        self._trainer: Trainer | None = None
        self._saved: SavedPolicy | None = None
        """In the place of a trainer, if the ranks only export a save."""
        self._sender: Sender | None = None
        self._colocated_group: ProcessGroup | None = None
        """Of all trainer ranks, while they exchange buckets."""
        self._rows: SftRows | None = None
        self._world: TCPStore | None = None
        self._stores: list[StoreServer] = []

    def process(self) -> ProcessId:
        """This rank's process."""
        return ProcessId.of_this_process(str(ray.get_runtime_context().get_node_id()))

    def rendezvous(self) -> tuple[str, int]:
        """Import the modules that `join` needs, on all ranks in parallel. Rank 0 opens the store: (host, port)."""
        progress.begin("rendezvous")
        with no_collection():
            import torch  # noqa: F401  # one import after the other, because each takes seconds

            progress.mark("import Megatron")
            import megatron_rl.model.parallel  # noqa: F401  # `join` uses it
            from rollout.transports.rendezvous import open_store

        if self._rank:
            return "", 0
        host = ray.util.get_node_ip_address()
        self._world = open_store(host=host, timeout_s=self._spec.config.timeout_s)
        return host, self._world.port

    def join(self, host: str, port: int) -> None:
        """Join the other ranks at rank 0's store, build the model, load its weights."""
        progress.begin("join")
        with no_collection():
            import torch

            from megatron_rl.model.parallel import initialize, join_store
            from megatron_rl.trainer.saves import SavedPolicy
            from megatron_rl.trainer.trainer import Trainer

        progress.mark("process groups")
        config = self._spec.config
        torch.set_num_threads(config.cpu_threads)
        position = initialize(
            config.parallel,
            rank=self._rank,
            store=self._world or join_store(host, port, config.timeout_s),
            timeout_s=NEVER.total_seconds(),
            seed=self._spec.seed,
            devices=given_devices(os.environ),
        )
        if self._spec.exports:
            self._saved = SavedPolicy(self._spec, position)
        else:
            self._trainer = Trainer(self._spec, position)
        # imported objects stay alive; without freezing, each full collection would scan them for 0.4 s
        gc.collect()
        gc.freeze()

    @property
    def _joined(self) -> "Trainer":
        if self._trainer is None:
            raise RuntimeError(f"trainer rank {self._rank} has not joined the world")
        return self._trainer

    def uses_te_layer_names(self) -> bool:
        """Whether parameters bear Transformer Engine's names (`model.layer_names`)."""
        from megatron_rl.model.build import layer_names

        return layer_names() == "te"

    def train(self, batch: RankBatch) -> StepResult:
        """See `Trainer.train`."""
        progress.begin("train")
        return self._joined.train(batch, _fetch)

    def load_rows(self, rows: SftRows) -> None:
        """Keep the rows of SFT."""
        self._rows = rows

    def sft_step(self, batch: SftBatch) -> StepResult:
        """See `Trainer.sft_step`; call `load_rows` first."""
        assert self._rows is not None, "load_rows comes first"
        progress.begin("sft step")
        return self._joined.sft_step(batch, self._rows)

    def open_shm(self) -> None:
        """Publish through shared memory from now on."""
        from rollout.transports.shm import ShmSender

        self._sender = ShmSender(run_id=self._spec.run_id, rank=self._rank)

    def open_stores(self, first_rank: int, num_engines: int) -> list[StoreAddress]:
        """On `first_rank`, open one store per engine for its process group, and close those of earlier groups."""
        from rollout.transports.store_server import StoreServer

        if self._rank != first_rank:
            return []
        for store in self._stores:
            store.close()
        host = ray.util.get_node_ip_address()
        self._stores = [StoreServer(host) for _ in range(num_engines)]
        return [store.address for store in self._stores]

    def attach_group(self, engine: int, channel: GroupChannel) -> str:
        """Publish through the process group of an engine, the first of its chain, from now on.

        Returns why the group is not complete; empty if nothing failed. That is no error of this rank, whose peers would
        lose the trainer by it.
        """
        from rollout.transports.streaming import GroupSender

        progress.begin("join engines", kind="handover")
        publish = self._spec.publish
        sender = GroupSender(
            run_id=self._spec.run_id,
            rank=self._rank,
            backend=channel.backend,
            timeout_s=publish.timeout_s,
            delta=publish.delta,
            full_every=publish.delta_full_every,
        )
        if self._rank in channel.source_ranks:
            try:
                sender.attach(engine, channel)
            except DeadlineError as error:
                self._sender = None
                return str(error)
        self._sender = sender
        progress.mark("joined")
        return ""

    def open_colocated(self, hosted: Sequence[Sequence[int]], memory: Memory, nodes: Sequence[str]) -> None:
        """Publish by sharing device memory from now on; call `plan_publishes` first.

        Args:
            hosted: by trainer rank, the engine ranks on its device.
            memory: kind of the shared memory.
            nodes: node of each trainer rank.
        """
        import torch.distributed as dist

        from rollout.transports.colocated import ColocatedSender, SharedRegion, ShmRegion

        if memory == "shm":
            region: SharedRegion = ShmRegion(run_id=self._spec.run_id, rank=self._rank)
        else:
            from rollout.transports.cuda_ipc import CudaRegion

            region = CudaRegion()
        progress.begin("join ranks for publishes")
        alone = len(hosted) == 1
        backend: Backend = "gloo" if memory == "shm" else "nccl"
        if self._colocated_group is not None:  # an engine was started again: its communicators would stay for ever
            dist.destroy_process_group(self._colocated_group)
        self._colocated_group = (
            None if alone else dist.new_group(list(range(len(hosted))), timeout=NEVER, backend=backend)
        )
        self._sender = ColocatedSender(
            region,
            self._colocated_group,
            run_id=self._spec.run_id,
            rank=self._rank,
            hosted=hosted,
            buckets=self._joined.publishes.plan.buckets,
            backend=backend,
            timeout_s=self._spec.publish.timeout_s,
            nodes=nodes,
        )

    def plan_publishes(self, required: Sequence[Required]) -> None:
        """See `Trainer.plan_publishes`."""
        progress.begin("plan publishes")
        self._joined.plan_publishes(required)

    def stage(self, weight_version: WeightVersion, with_sums: bool = True) -> StagedWeights:
        """See `Trainer.stage`."""
        if self._sender is None:
            raise RuntimeError(f"trainer rank {self._rank} has no transport; open one before the first publish")
        progress.begin(f"publish {weight_version}")
        return self._joined.stage(weight_version, self._sender, with_sums=with_sums)

    def unstage(self) -> None:
        """Release the staged publish."""
        if self._sender is not None:
            self._sender.abandon()

    def proof(self, token_ids: list[int]) -> TrainerProof:
        """See `Trainer.proof`."""
        progress.begin("proof of a publish")
        return self._joined.proof(token_ids)

    def probe(self, token_ids: list[int]) -> ProbeResult | None:
        """See `Trainer.probe`."""
        progress.begin("probe")
        return self._joined.probe(token_ids)

    def offload(self, parts: "Sequence[Part]") -> int:
        """See `Trainer.offload`."""
        progress.begin("offload")
        return self._joined.offload(parts)

    def onload(self) -> None:
        """See `Trainer.onload`."""
        progress.begin("onload")
        self._joined.onload()

    def begin_save(self, path: str, background: bool) -> None:
        """See `Trainer.begin_save`."""
        progress.begin("begin a save", kind="files")
        self._joined.begin_save(path, background=background)

    def save_seconds(self) -> float | None:
        """See `Trainer.save_seconds`."""
        progress.begin("ask for a save")
        return self._joined.save_seconds()

    def finish_save(self) -> float:
        """See `Trainer.finish_save`."""
        progress.begin("finish a save", kind="files")
        return self._joined.finish_save()

    def load(self, path: str) -> None:
        """See `Trainer.load`."""
        progress.begin("load", kind="files")
        self._joined.load(path)

    def export(self, path: str) -> None:
        """See `Trainer.export`."""
        progress.begin("export")
        (self._saved or self._joined).export(path)


def _fetch(refs: Sequence[ColumnsRef]) -> list[GroupColumns]:
    columns: list[GroupColumns] = ray.get(list(refs))
    return columns
