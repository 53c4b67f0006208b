"""Transports that keep weights on CUDA devices."""

import multiprocessing
import time
from multiprocessing.connection import Connection

import pytest
import torch

from rollout.transports.base import GroupChannel, StoreAddress
from rollout.transports.checksum import multilinear
from rollout.transports.colocated import ColocatedInbox, ColocatedSender
from rollout.transports.store_server import StoreServer
from rollout.transports.streaming import GroupInbox, GroupSender
from rollout.types import WeightVersion
from rollout.weights.manifest import Box, Bucket, WeightManifest
from rollout.worker.received_pieces import ReceivedPieces
from tests.support.engines.packing import RUN_ID, Publish, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TIMEOUT_S = 60
PUBLISH_S = 10
"""Limit of a publish that cannot succeed."""
WATCHDOG_S = 3
"""In which torch's watchdog, if there were one, would see an error and end its process."""


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(5000, 64, generator=random).bfloat16(),
        "q_proj.weight": torch.randint(-127, 128, (640, 512), dtype=torch.int8, generator=random),
        "q_proj.weight_scale": torch.rand(640, 1, generator=random),
        "norm.weight": torch.randn(512, generator=random).bfloat16(),
    }


def publish(version: int) -> Publish:
    return pack(tensors(), version, "int8", bucket_bytes=100_000)


def arrived(found: Publish, inbox: ColocatedInbox | GroupInbox) -> bool:
    """Whether every tensor arrived complete on a device."""
    received = ReceivedPieces(found.manifest, inbox, engine_rank=0)
    for name, expected in tensors().items():
        part = received.read(name, Box(start=(0,) * expected.dim(), shape=tuple(expected.shape)))
        if not part.is_cuda or not torch.equal(part.cpu(), expected):
            return False
    return True


@pytest.mark.parametrize("length", [0, 1, 63, 4096 * 4 * 3 + 5, 9_000_001])
def test_device_and_host_compute_the_same_checksum(length):
    payload = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert multilinear(payload.cuda()) == multilinear(payload)


def _map(pipe: Connection) -> None:
    """Another process on the same device: maps two publishes and answers whether every tensor arrived."""
    from rollout.transports.cuda_ipc import map_cuda

    for version in (0, 1):
        memory = map_cuda(pipe.recv())
        inbox = ColocatedInbox(publish(version).manifest, memory, engine_rank=0, shared_with=[0])
        pipe.send(arrived(publish(version), inbox))
        del memory, inbox


def test_buckets_on_a_device_are_mapped_by_another_process_and_freed():
    from rollout.transports.cuda_ipc import CudaRegion

    before = torch.cuda.memory_allocated()
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    reader = context.Process(target=_map, args=(end,))
    reader.start()
    buckets = publish(0).manifest.buckets
    sender = ColocatedSender(
        CudaRegion(), None, run_id=RUN_ID, rank=0, hosted=[[0]], buckets=buckets, backend="nccl", timeout_s=TIMEOUT_S
    )
    for version in (0, 1):
        pipe.send(publish(version).send(sender))
        assert pipe.poll(TIMEOUT_S) and pipe.recv() is True
        sender.abandon()
    reader.join(TIMEOUT_S)
    assert reader.exitcode == 0
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() < before + (1 << 20)


def _take(store: StoreAddress, pipe: Connection) -> None:
    torch.cuda.set_device(1)
    inbox = GroupInbox(_channel(store), engine_rank=0)
    for version in range(3):
        found = publish(version)
        inbox.expect(found.manifest, timeout_s=TIMEOUT_S)
        pipe.send(arrived(found, inbox))


def _channel(store: StoreAddress) -> GroupChannel:
    return GroupChannel(backend="nccl", store=store, source_ranks=(0,), num_engine_ranks=1, timeout_s=TIMEOUT_S)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each rank")
@pytest.mark.parametrize("delta", [False, True])
def test_nccl_delivers_publishes_from_device_to_device(delta):
    store = StoreServer("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    reader = context.Process(target=_take, args=(store.address, end))
    reader.start()
    sender = GroupSender(run_id=RUN_ID, rank=0, backend="nccl", timeout_s=TIMEOUT_S, delta=delta)
    sender.attach(0, _channel(store.address))
    for version in range(3):
        publish(version).send(sender)
        assert pipe.poll(TIMEOUT_S) and pipe.recv() is True
    reader.join(TIMEOUT_S)
    assert reader.exitcode == 0


def _large() -> WeightManifest:
    """Four buckets that do not fit into NCCL's buffers, so a sender waits for its receiver."""
    buckets = tuple(Bucket(index=index, source_rank=0, num_bytes=32 << 20, pieces=()) for index in range(4))
    return WeightManifest(run_id=RUN_ID, weight_version=WeightVersion(0), format="int8", tensors=(), buckets=buckets)


def _take_the_first(store: StoreAddress, pipe: Connection) -> None:
    torch.cuda.set_device(1)
    inbox = GroupInbox(_channel(store), engine_rank=0)
    manifest = _large()
    inbox.expect(manifest, timeout_s=TIMEOUT_S)
    inbox.take(manifest.buckets[0])
    pipe.send("took the first bucket")
    time.sleep(TIMEOUT_S)


def _give(store: StoreAddress, pipe: Connection) -> None:
    """A publish whose receiver ends after the first bucket. Quantising the third takes longer than a watchdog waits."""
    sender = GroupSender(run_id=RUN_ID, rank=0, backend="nccl", timeout_s=PUBLISH_S)
    sender.attach(0, _channel(store))
    manifest = _large()
    sender.open(manifest.weight_version, manifest.buckets)
    for bucket in manifest.buckets:
        if bucket.index == 1:
            pipe.recv()  # the receiver has ended
        elif bucket.index == 2:
            time.sleep(WATCHDOG_S)
        sender.commit(bucket.index)
    sender.finish()
    pipe.send(sender.fault)
    time.sleep(WATCHDOG_S)
    pipe.send("alive")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each rank")
@pytest.mark.parametrize("link", ["between devices", "over sockets"])
def test_a_trainer_rank_outlives_an_engine_that_is_killed_in_a_publish(link, monkeypatch):
    """Over sockets NCCL reports the death; between devices it does not, and the publish's limit passes."""
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100")  # a watchdog sleeps four times as long, then acts
    if link == "over sockets":
        for variable in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
            monkeypatch.setenv(variable, "1")
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    store = StoreServer("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    (taken, end_taken), (given, end_given) = context.Pipe(), context.Pipe()
    reader = context.Process(target=_take_the_first, args=(store.address, end_taken))
    rank = context.Process(target=_give, args=(store.address, end_given))
    reader.start()
    rank.start()
    assert taken.poll(TIMEOUT_S) and taken.recv() == "took the first bucket"
    reader.kill()
    reader.join(TIMEOUT_S)
    given.send("the receiver has ended")
    assert given.poll(TIMEOUT_S) and "for engine 0 rank 0 to take bucket" in given.recv()
    assert given.poll(TIMEOUT_S) and given.recv() == "alive"
    rank.join(TIMEOUT_S)
    assert rank.exitcode == 0
