"""A trainer rank or an engine rank of `benchmarks.publish.over_nodes`: the product's transport, random bytes.

It prints its stores (port and secret), reads a line with all stores, prints `ready`, waits for a line, publishes once,
prints `done`, waits for a line and ends. The received buckets are verified by their checksums.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import read_model_spec
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard
from rollout.transports.base import GroupChannel, Sender, StoreAddress, chain
from rollout.transports.colocated import ColocatedInbox, ColocatedSender, ShmRegion, map_shm
from rollout.transports.rendezvous import join
from rollout.transports.store_server import StoreServer
from rollout.transports.streaming import GroupInbox, GroupSender
from rollout.types import WeightVersion
from rollout.weights.format import WeightFormat
from rollout.weights.manifest import WeightManifest

RUN_ID = "overnodes"
TIMEOUT_S = 120.0
BUCKET_BYTES = 16 << 20
VERSION = WeightVersion(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks and nodes of one case."""

    model: str
    """Hugging Face directory; only its `config.json` is read."""
    tensor: int
    data: int
    trainer_nodes: tuple[int, ...]
    """Node of each trainer rank."""
    engine_nodes: tuple[int, ...]
    """Node of each engine of one rank. Empty: colocated, each trainer rank hands over to the engine on its device."""
    host: str
    """Address of trainer rank 0."""

    @property
    def num_processes(self) -> int:
        """Trainer ranks first, then engines."""
        return len(self.trainer_nodes) + len(self.engine_nodes)

    def plan(self) -> ReshardPlan:
        """The plan of a publish in int8; engines of one rank require everything."""
        return plan_reshard(
            read_model_spec(Path(self.model)),
            ParallelConfig(tensor=self.tensor, data=self.data),
            format=WeightFormat(name="int8"),
            bucket_bytes=BUCKET_BYTES,
            uses_te_layer_names=False,
        )


def main(layout_file: str, number: str) -> None:
    """Take part in one publish as process `number`."""
    layout, rank = Layout(**json.loads(Path(layout_file).read_text(encoding="utf-8"))), int(number)
    plan = layout.plan()
    num_stores = max(1, len(layout.engine_nodes)) if rank == 0 else 0
    servers = [StoreServer(layout.host) for _ in range(num_stores)]
    _say(json.dumps([(server.address.port, server.address.secret.hex()) for server in servers]))
    found: list[tuple[int, str]] = json.loads(sys.stdin.readline())
    stores = [StoreAddress(host=layout.host, port=port, secret=bytes.fromhex(secret)) for port, secret in found]
    publish, end = (_colocated if not layout.engine_nodes else _disaggregated)(layout, plan, rank, stores)
    _say("ready")
    sys.stdin.readline()
    publish()
    _say("done")
    sys.stdin.readline()
    end()


Steps = tuple[Callable[[], None], Callable[[], None]]
"""Publishing, and ending."""


def _colocated(layout: Layout, plan: ReshardPlan, rank: int, stores: list[StoreAddress]) -> Steps:
    world = len(layout.trainer_nodes)
    channel = GroupChannel(store=stores[0], source_ranks=tuple(range(world)), num_engine_ranks=0, timeout_s=TIMEOUT_S)
    sender = ColocatedSender(
        ShmRegion(run_id=RUN_ID, rank=rank),
        join(channel, rank),
        run_id=RUN_ID,
        rank=rank,
        hosted=[[0]] * world,
        buckets=plan.buckets,
        backend="gloo",
        timeout_s=TIMEOUT_S,
        nodes=[str(node) for node in layout.trainer_nodes],
    )

    def publish() -> None:
        address = _send(plan, sender, rank)
        memory = map_shm(_manifest(plan), address, engine_rank=0, shared_with=[0])
        ColocatedInbox(_manifest(plan), memory, engine_rank=0, shared_with=[0])  # verifies every bucket

    return publish, sender.abandon


def _disaggregated(layout: Layout, plan: ReshardPlan, rank: int, stores: list[StoreAddress]) -> Steps:
    num_engines, num_trainers = len(layout.engine_nodes), len(layout.trainer_nodes)
    channels = chain(
        dict(enumerate(stores)),
        order=range(num_engines),
        source_ranks=plan.source_ranks,
        num_engine_ranks=1,
        timeout_s=TIMEOUT_S,
    )
    if rank < num_trainers:
        sender = GroupSender(run_id=RUN_ID, rank=rank, timeout_s=TIMEOUT_S)
        sender.attach(0, channels[0])
        return lambda: _done(_send(plan, sender, rank)), sender.abandon
    inbox = GroupInbox(channels[rank - num_trainers], engine_rank=0)

    def publish() -> None:
        inbox.expect(_manifest(plan), timeout_s=TIMEOUT_S)
        for bucket in plan.buckets:
            inbox.take(bucket)

    return publish, inbox.close


def _send(plan: ReshardPlan, sender: Sender, rank: int) -> str:
    """Send random bytes in all buckets of a rank; returns the address of what is staged."""
    random = torch.Generator().manual_seed(rank)
    own = plan.buckets_of(rank)
    sender.open(VERSION, own)
    for bucket in own:
        sender.buffer(bucket.index).random_(generator=random)
        sender.commit(bucket.index)
    return sender.finish()


def _done(address: str) -> None:
    assert not address, "a streaming transport stages nothing"


def _manifest(plan: ReshardPlan) -> WeightManifest:
    return plan.manifest(RUN_ID, VERSION)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
