"""Transports move bytes of numbered buckets, refuse damaged buckets, and name late ranks."""

import dataclasses
import errno
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from rollout.transports import shm_files as files
from rollout.transports import streaming
from rollout.transports.base import GroupChannel, Inbox, StoreAddress, chain, side_by_side
from rollout.transports.colocated import ColocatedInbox, ColocatedSender, ShmRegion, map_shm
from rollout.transports.deadline import Deadline
from rollout.transports.delta import HEADER
from rollout.transports.prefetch import Prefetch
from rollout.transports.rendezvous import join
from rollout.transports.shm import ShmInbox, ShmSender
from rollout.transports.store_server import StoreServer
from rollout.transports.streaming import GroupInbox, GroupSender
from rollout.types import WeightVersion
from rollout.weights.manifest import Box, Bucket, WeightManifest
from rollout.worker.received_pieces import ReceivedPieces
from tests.support.engines import packing
from tests.support.engines.packing import Publish
from tests.support.strangers import knocking

RUN_ID = "transporttest"
"""Of no other test, so that what is left in shared memory is of this file."""
pack = partial(packing.pack, run_id=RUN_ID)


@pytest.fixture(autouse=True)
def _loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(100, 16).bfloat16(),
        "layers.0.q_proj.weight": torch.randint(-127, 128, (64, 16), dtype=torch.int8),
        "layers.0.q_proj.weight_scale": torch.rand(64, 1),
        "layers.0.o_proj.weight": torch.randint(-127, 128, (16, 64), dtype=torch.int8),
        "layers.0.norm.weight": torch.randn(16).bfloat16(),
    }


def assemble(manifest: WeightManifest, inbox: Inbox) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a publish, whole."""
    received = ReceivedPieces(manifest, inbox, engine_rank=0)
    boxes = [(spec.name, Box(start=(0,) * len(spec.shape), shape=spec.shape)) for spec in manifest.tensors]
    return [(name, received.read(name, box)) for name, box in boxes]


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


# -- shared memory -------------------------------------------------------------------------------------


@pytest.fixture
def stage():
    senders = [ShmSender(run_id=RUN_ID, rank=rank) for rank in range(2)]

    def send(publish: Publish) -> dict[int, str]:
        return {rank: publish.send(sender, rank) for rank, sender in enumerate(senders)}

    yield send
    for sender in senders:
        sender.abandon()


def arrive(inbox: ShmInbox) -> None:
    until = time.monotonic() + 20
    while not inbox.arrived() and time.monotonic() < until:
        time.sleep(0.001)
    assert inbox.arrived()


def test_a_rank_verifies_only_the_buckets_that_it_requires(stage, monkeypatch):
    publish = pack(tensors(), 7, "int8", num_ranks=2, bucket_bytes=1000)
    buckets = [dataclasses.replace(bucket, engine_ranks=(bucket.index % 2,)) for bucket in publish.manifest.buckets]
    seen = []
    monkeypatch.setattr("rollout.transports.shm.verify", lambda bucket, version, *, run_id, index: seen.append(index))
    manifest = dataclasses.replace(publish.manifest, buckets=tuple(buckets))
    arrive(ShmInbox(manifest, stage(publish), engine_rank=1))
    assert len(buckets) > 3 and seen == [bucket.index for bucket in buckets if bucket.index % 2]


@pytest.mark.parametrize("bucket_bytes", [64, 1000, 1 << 20])
def test_shared_memory_restores_every_tensor_from_pieces_of_two_ranks(stage, bucket_bytes):
    publish = pack(tensors(), 7, "int8", num_ranks=2, bucket_bytes=bucket_bytes)
    segments = stage(publish)
    assert equal(dict(assemble(publish.manifest, ShmInbox(publish.manifest, segments, engine_rank=0))), tensors())


def test_a_tensor_in_one_piece_is_not_copied(stage):
    publish = pack(tensors(), 7, "int8")
    inbox = ShmInbox(publish.manifest, stage(publish), engine_rank=0)
    start = inbox.take(publish.manifest.buckets[0]).data_ptr()
    _, first = assemble(publish.manifest, inbox)[0]
    assert first.data_ptr() == start


def test_a_shared_memory_file_appears_whole_or_not_at_all():
    sender = ShmSender(run_id=RUN_ID, rank=0)
    publish = pack(tensors(), 7, "int8")
    sender.open(publish.manifest.weight_version, publish.manifest.buckets)
    path = files.segment_path(run_id=RUN_ID, pid=os.getpid(), weight_version=7, rank=0)
    assert not path.exists()
    assert sender.finish() == str(path)
    assert path.exists()
    sender.abandon()
    assert not path.exists()


def test_readers_keep_their_view_after_the_sender_unlinks_the_file(stage):
    publish = pack(tensors(), 7, "int8")
    sender = ShmSender(run_id=RUN_ID, rank=5)
    inbox = ShmInbox(publish.manifest, {0: publish.send(sender)}, engine_rank=0)
    sender.abandon()
    assert equal(dict(assemble(publish.manifest, inbox)), tensors())


def test_buckets_leave_memory_once_they_are_released_and_views_of_them_stay_valid(stage):
    publish = pack({"a.weight": torch.randn(512, 512), "b.weight": torch.randn(512, 512)}, 7, "bf16", bucket_bytes=1000)
    segments = stage(publish)
    inbox = ShmInbox(publish.manifest, segments, engine_rank=0)
    first, second = publish.manifest.buckets
    arrive(inbox)
    whole = resident(segments[0])
    assert whole >= 2 * (512 * 512 * 4)
    with torch.inference_mode():  # here a view does not keep the tensor that it is of
        bucket = inbox.take(first)
        view, before = bucket[5000:], bucket[5000:].clone()
    assert resident(segments[0]) == whole
    del bucket
    assert whole - first.num_bytes <= resident(segments[0]) <= whole - first.num_bytes + 2 * mmap.PAGESIZE
    assert torch.equal(view, before) and view.count_nonzero()
    inbox.take(second)
    assert resident(segments[0]) <= first.num_bytes + 2 * mmap.PAGESIZE


def resident(path: str) -> int:
    """Bytes of a mapped file that this process has resident."""
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    (mapped,) = (part for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps) if path in part.splitlines()[0])
    return int(mapped.split("\nRss:")[1].split()[0]) * 1024


def test_a_corrupt_bucket_in_shared_memory_is_named(stage):
    publish = pack(tensors(), 7, "int8", num_ranks=2, bucket_bytes=1000)
    segments = stage(publish)
    offsets, _ = files.bucket_offsets([b for b in publish.manifest.buckets if b.source_rank == 1])
    index = max(offsets)
    with Path(segments[1]).open("r+b") as file:
        file.seek(offsets[index])
        byte = file.read(1)
        file.seek(offsets[index])
        file.write(bytes([byte[0] ^ 1]))
    inbox = ShmInbox(publish.manifest, segments, engine_rank=0)
    with pytest.raises(RuntimeError, match=f"bucket {index}: checksum"):
        arrive(inbox)
    with pytest.raises(RuntimeError, match=f"bucket {index}: checksum"):
        inbox.take(publish.manifest.buckets[0])


def test_a_bucket_found_corrupt_during_the_query_has_not_arrived(stage):
    publish = pack(tensors(), 7, "int8")
    inbox = ShmInbox(publish.manifest, stage(publish), engine_rank=0)
    arrive(inbox)
    answers = iter([False, True])
    inbox._verified = SimpleNamespace(done=lambda: next(answers))
    assert not inbox.arrived()


def test_a_missing_shared_memory_file_names_its_rank(stage):
    publish = pack(tensors(), 7, "int8", num_ranks=2)
    segments = stage(publish)
    with pytest.raises(RuntimeError, match="trainer rank 1"):
        ShmInbox(publish.manifest, {0: segments[0]}, engine_rank=0)
    with pytest.raises(RuntimeError, match="trainer rank 1"):
        ShmInbox(publish.manifest, {0: segments[0], 1: segments[1] + "x"}, engine_rank=0)


def test_a_truncated_shared_memory_file_is_refused(stage):
    publish = pack(tensors(), 7, "int8", num_ranks=2)
    segments = stage(publish)
    os.truncate(segments[0], 10)
    with pytest.raises(RuntimeError, match="has 10 bytes"):
        ShmInbox(publish.manifest, segments, engine_rank=0)


def test_a_full_device_is_an_error_with_a_remedy_and_leaves_nothing_behind():
    before = set(files.SHM.iterdir())
    size = 1 << 50
    with pytest.raises((RuntimeError, OSError)) as error:
        files.SegmentFile(run_id=RUN_ID, rank=0).reserve(WeightVersion(0), size)
    assert "room" in str(error.value) or error.value.errno
    assert not [path for path in set(files.SHM.iterdir()) - before if RUN_ID in path.name]


def test_sweep_removes_files_that_nobody_holds_and_those_of_the_named_run():
    left = files.segment_path(run_id="sweeptest-1", pid=os.getpid(), weight_version=3, rank=0)
    part = left.with_name(f".{left.name}.part")
    other = files.SHM / "sweeptest-something-else"
    held = files.SegmentFile(run_id="sweeptest-2", rank=1)
    held.begin(WeightVersion(1), 10)
    shown = Path(held.show())
    # of another container: its process id is that of no process here
    foreign = shown.rename(shown.with_name(shown.name.replace(f"-{os.getpid()}-", f"-{1 << 30}-")))
    for path in (left, part, other):
        path.write_bytes(b"x")
    try:
        assert {left, part} <= set(files.sweep())
        assert foreign.exists() and other.exists()
        assert foreign in files.sweep("sweeptest-2")
        assert other.exists()
    finally:
        other.unlink()
        held.remove()


def test_a_sweep_leaves_a_file_that_took_the_path_of_one_that_another_sweep_removed(monkeypatch):
    path = files.segment_path(run_id="sweeptest-3", pid=os.getpid(), weight_version=1, rank=0)
    path.write_bytes(b"old")
    opened = files.open_own

    def open_before_it_is_replaced(found: Path) -> int | None:
        descriptor = opened(found)
        if found == path:
            path.unlink()
            path.write_bytes(b"new")
        return descriptor

    monkeypatch.setattr(files, "open_own", open_before_it_is_replaced)
    try:
        assert path not in files.sweep()
        assert path.read_bytes() == b"new"
    finally:
        path.unlink()


@pytest.mark.parametrize("kind", ["link", "pipe", "another user's"])
def test_links_and_files_of_other_users_are_neither_removed_nor_mapped(kind, tmp_path):
    path = files.segment_path(run_id="planted", pid=1 << 30, weight_version=3, rank=0)
    (tmp_path / "target").write_bytes(b"x")
    if kind == "link":
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"x")
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
    me = os.geteuid() if os.geteuid() == 0 else os.geteuid() + 1
    try:
        with patch.object(os, "geteuid", return_value=me) if kind == "another user's" else nullcontext():
            assert path not in files.sweep() and path not in files.sweep("planted")
            with pytest.raises(RuntimeError, match=r"rank 0 .* is a link, or belongs to another user"):
                files.map_segment(0, str(path), 1, WeightVersion(3))
        assert path.is_symlink() or path.exists()
        assert (tmp_path / "target").read_bytes() == b"x"
    finally:
        path.unlink()


# -- gloo ----------------------------------------------------------------------------------------------


def in_threads(*jobs: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(60) for future in [pool.submit(job) for job in jobs]]


def connect(
    num_engine_ranks: int, timeout_s: float, store: StoreServer | None = None, **more: object
) -> tuple[list[GroupSender], list[GroupInbox], object]:
    store = store or StoreServer("127.0.0.1")
    channel = GroupChannel(store=store.address, source_ranks=(4, 6), num_engine_ranks=num_engine_ranks, timeout_s=20)
    senders = [GroupSender(run_id=RUN_ID, rank=rank, timeout_s=timeout_s, **more) for rank in (4, 6)]
    found = in_threads(
        *(lambda s=sender: s.attach(0, channel) for sender in senders),
        *(lambda r=rank: GroupInbox(channel, engine_rank=r) for rank in range(num_engine_ranks)),
    )
    return senders, found[2:], store


def publish_of_ranks_4_and_6(version: int, bucket_bytes: int = 1000) -> Publish:
    publish = pack(tensors(), version, "int8", num_ranks=2, bucket_bytes=bucket_bytes)
    buckets = tuple(dataclasses.replace(b, source_rank=(4, 6)[b.source_rank]) for b in publish.manifest.buckets)
    return Publish(dataclasses.replace(publish.manifest, buckets=buckets), publish.payloads)


def receive(inbox: GroupInbox, publish: Publish, timeout_s: float = 20) -> dict[str, torch.Tensor]:
    inbox.expect(publish.manifest, timeout_s=timeout_s)
    return dict(assemble(publish.manifest, Prefetch(inbox, publish.manifest.buckets)))


def test_gloo_delivers_two_publishes_of_two_ranks_to_two_engine_ranks():
    senders, inboxes, _store = connect(2, 20)
    for version in (0, 1):
        publish = publish_of_ranks_4_and_6(version)
        found = in_threads(
            lambda p=publish: p.send(senders[0], 4),
            lambda p=publish: p.send(senders[1], 6),
            *(lambda i=inbox, p=publish: receive(i, p) for inbox in inboxes),
        )
        assert all(equal(tensors_of_rank, tensors()) for tensors_of_rank in found[2:])


def test_strangers_at_the_store_change_nothing_of_a_publish():
    store = StoreServer("127.0.0.1")
    with knocking(store.address) as heard:
        senders, inboxes, _ = connect(2, 20, store)
        for version in (0, 1):
            publish = publish_of_ranks_4_and_6(version)
            found = in_threads(
                lambda p=publish: p.send(senders[0], 4),
                lambda p=publish: p.send(senders[1], 6),
                *(lambda i=inbox, p=publish: receive(i, p) for inbox in inboxes),
            )
            assert all(equal(tensors_of_rank, tensors()) for tensors_of_rank in found[2:])
    assert set(heard) == {b""} and store.num_refused > 0


def raw(inbox: GroupInbox, publish: Publish, timeout_s: float = 20) -> dict[int, list[tuple[int, bytes]]]:
    """Offset and verified bytes of every piece by bucket; bytes between pieces are undefined."""
    inbox.expect(publish.manifest, timeout_s=timeout_s)
    taken = {bucket.index: inbox.take(bucket) for bucket in publish.manifest.buckets}
    return {
        index: [
            (offset, view[offset : offset + len(data)].numpy().tobytes()) for offset, data in publish.payloads[index]
        ]
        for index, view in taken.items()
    }


def test_deltas_rebuild_the_new_buckets_and_every_fourth_publish_is_sent_whole():
    senders, (inbox,), _store = connect(1, 20, delta=True, full_every=4)
    sent = []
    for version in range(5):
        publish = publish_of_ranks_4_and_6(version)
        for parts in publish.payloads.values():  # one byte of each bucket
            offset, data = parts[0]
            parts[0] = offset, bytes([version]) + data[1:]
        found = in_threads(
            lambda p=publish: p.send(senders[0], 4),
            lambda p=publish: p.send(senders[1], 6),
            lambda p=publish: raw(inbox, p),
        )
        assert found[2] == publish.payloads
        sent.append(sum(sender.sent_bytes for sender in senders))
    whole = sum(bucket.num_bytes for bucket in publish.manifest.buckets)
    assert sent[0] == sent[4] > whole > 10 * sent[1]
    assert sent[1] == sent[2] == sent[3]


def test_gloo_channels_leave_the_default_group_uninitialised():
    connect(1, 20)
    assert not torch.distributed.is_initialized()


def test_a_trainer_rank_that_sends_nothing_is_named():
    senders, (inbox,), _store = connect(1, 20)
    publish = publish_of_ranks_4_and_6(0)
    first_of_6 = next(bucket.index for bucket in publish.manifest.buckets if bucket.source_rank == 6)
    sender = threading.Thread(target=lambda: publish.send(senders[0], 4, only=first_of_6))
    sender.start()
    with pytest.raises(RuntimeError, match=r"engine rank 0 waited in vain .* trainer rank 6 to send bucket"):
        receive(inbox, publish, timeout_s=2)
    sender.join()


def test_a_stop_of_the_job_in_a_publish_blames_neither_engine_nor_trainer(monkeypatch):
    """All processes are stopped together, so their peers have not sent meanwhile, either."""
    stopped = [0.0]
    monkeypatch.setattr(streaming, "Deadline", partial(Deadline, clock=lambda: time.monotonic() + stopped[0]))
    senders, (inbox,), _store = connect(1, 20)
    publish = publish_of_ranks_4_and_6(0)

    def send(sender, rank):
        time.sleep(0.5)
        stopped[0] = 3600.0
        time.sleep(1.0)
        publish.send(sender, rank)
        return sender.fault

    found, *faults = in_threads(
        lambda: receive(inbox, publish), lambda: send(senders[0], 4), lambda: send(senders[1], 6)
    )
    assert equal(found, tensors()) and faults == ["", ""]


def test_an_engine_that_receives_nothing_is_named_and_detached():
    senders, _inboxes, _store = connect(1, 1)
    publish = publish_of_ranks_4_and_6(0)
    publish.send(senders[0], 4)
    assert re.search(r"trainer rank 4 waited in vain .* engine 0 rank 0 to take bucket 0", senders[0].fault)
    publish.send(senders[0], 4)  # no engine is attached any more
    assert senders[0].fault == ""


def test_a_restarted_engine_gets_a_whole_publish():
    """The new process has no baselines; the other engine still gets deltas."""
    store = StoreServer("127.0.0.1")
    again = StoreServer("127.0.0.1")
    other = StoreServer("127.0.0.1")
    sender = GroupSender(run_id=RUN_ID, rank=4, timeout_s=20, delta=True)

    def join(engine_id: int, store: StoreServer) -> GroupInbox:
        channel = GroupChannel(store=store.address, source_ranks=(4,), num_engine_ranks=1, timeout_s=20)
        return in_threads(lambda: sender.attach(engine_id, channel), lambda: GroupInbox(channel, engine_rank=0))[1]

    inboxes = [join(0, store), join(1, other)]
    for version in range(3):
        if version == 2:
            inboxes[0] = join(0, again)
        publish = pack(tensors(), version, "int8")
        renumbered = dataclasses.replace(
            publish.manifest,
            buckets=tuple(dataclasses.replace(bucket, source_rank=4) for bucket in publish.manifest.buckets),
        )
        publish = Publish(renumbered, publish.payloads)
        found = in_threads(lambda p=publish: p.send(sender, 4), *(lambda i=i, p=publish: raw(i, p) for i in inboxes))
        assert found[1] == found[2] == publish.payloads


def test_a_delta_of_another_baseline_version_is_refused():
    senders, (inbox,), _store = connect(1, 20, delta=True)
    first, second = publish_of_ranks_4_and_6(0), publish_of_ranks_4_and_6(1)
    in_threads(lambda: first.send(senders[0], 4), lambda: first.send(senders[1], 6), lambda: raw(inbox, first))
    inbox._baselines = {
        index: (7, kept) for index, (_, kept) in inbox._baselines.items()
    }  # pretends that another publish arrived
    sending = threading.Thread(target=lambda: second.send(senders[0], 4, only=1))
    sending.start()
    with pytest.raises(RuntimeError, match="a delta on weight version 0 came, but this rank keeps version 7"):
        raw(inbox, second)
    sending.join()


def test_a_bucket_of_another_version_is_refused():
    senders, (inbox,), _store = connect(1, 20)
    sent, expected = publish_of_ranks_4_and_6(3), publish_of_ranks_4_and_6(4)
    sender = threading.Thread(target=lambda: sent.send(senders[0], 4, only=1))
    sender.start()
    with pytest.raises(RuntimeError, match="carries weight version 3, the manifest says 4"):
        receive(inbox, expected)
    sender.join()


def test_an_engine_rank_that_does_not_join_a_channel_is_named():
    store = StoreServer("127.0.0.1")
    channel = GroupChannel(store=store.address, source_ranks=(3,), num_engine_ranks=2, timeout_s=1)
    with pytest.raises(RuntimeError, match=r"trainer rank 3 waited 1 s .* for engine rank 0, engine rank 1"):
        GroupSender(run_id=RUN_ID, rank=3, timeout_s=1).attach(0, channel)


class Chain:
    """Two trainer ranks, 4 and 6, and a chain of engines."""

    def __init__(
        self,
        num_engines: int,
        num_ranks: int,
        *,
        timeout_s: float = 20,
        order: Sequence[int] | None = None,
        **more: object,
    ) -> None:
        order = range(num_engines) if order is None else order
        self.stores = [StoreServer("127.0.0.1") for _ in range(num_engines)]
        addresses = {engine: store.address for engine, store in enumerate(self.stores)}
        channels = chain(addresses, order=order, source_ranks=(4, 6), num_engine_ranks=num_ranks, timeout_s=20)
        self.senders = [GroupSender(run_id=RUN_ID, rank=rank, timeout_s=timeout_s, **more) for rank in (4, 6)]
        _, _, *inboxes = in_threads(
            *(lambda s=sender: s.attach(order[0], channels[order[0]]) for sender in self.senders),
            *(lambda c=c, r=r: GroupInbox(c, engine_rank=r) for c in channels.values() for r in range(num_ranks)),
        )
        self.engines = [inboxes[first : first + num_ranks] for first in range(0, len(inboxes), num_ranks)]

    def publish(self, publish: Publish) -> list[object]:
        """Received payloads of each inbox, engine by engine."""
        _, _, *found = in_threads(
            *(lambda s=s, r=r: publish.send(s, r) for s, r in zip(self.senders, (4, 6), strict=True)),
            *(lambda i=inbox: raw(i, publish) for engine in self.engines for inbox in engine),
        )
        return found


@pytest.mark.parametrize("delta", [False, True])
def test_every_engine_of_a_chain_gets_all_buckets_and_trainer_ranks_send_them_to_the_first_only(delta):
    chain = Chain(3, 2, delta=delta)
    sent = []
    for version in range(3):
        publish = changing(version)
        assert all(found == publish.payloads for found in chain.publish(publish))
        sent.append(sum(sender.sent_bytes for sender in chain.senders))
        assert all(len(sender._groups) == 1 for sender in chain.senders)
    whole = sum(bucket.num_bytes + HEADER.size for bucket in publish.manifest.buckets)
    assert [inbox.received_bytes for engine in chain.engines for inbox in engine] == [sent[-1] // 2] * 6
    whole *= 2  # both ranks of an engine require every bucket
    assert sent[0] == whole
    assert sent[2] < whole / 10 if delta else sent[2] == whole


def changing(version: int) -> Publish:
    """Every publish changes the first byte of every bucket."""
    publish = publish_of_ranks_4_and_6(version)
    for parts in publish.payloads.values():
        offset, data = parts[0]
        parts[0] = offset, bytes([version]) + data[1:]
    return publish


def test_a_chain_follows_the_requested_order_of_engines():
    chain = Chain(3, 2, order=[1, 2, 0])
    publish = changing(0)
    assert all(found == publish.payloads for found in chain.publish(publish))
    before = [engine[0]._channel.source_engine for engine in chain.engines]
    assert before == [2, None, 1]
    assert all(list(sender._groups) == [1] for sender in chain.senders)


def test_engines_of_a_node_are_neighbours_in_a_chain():
    assert side_by_side(dict(enumerate(["b", "a", "b", "c", "a"]))) == [0, 2, 1, 4, 3]
    assert side_by_side(dict.fromkeys(range(4), "a")) == [0, 1, 2, 3]
    assert side_by_side({0: "b", 2: "a", 3: "b"}) == [0, 3, 2], "engine 1 is given up"


def test_channels_name_engines_by_number_after_one_was_given_up():
    store = StoreAddress(host="127.0.0.1", port=1, secret=b"")
    channels = chain(
        dict.fromkeys((0, 2, 3), store), order=[0, 2, 3], source_ranks=(4,), num_engine_ranks=1, timeout_s=1
    )
    assert {engine: channel.named(0) for engine, channel in channels.items()} == {
        0: "trainer rank 4",
        2: "engine 0's rank 0",
        3: "engine 2's rank 0",
    }
    assert channels[0].onward is channels[2] and channels[2].onward is channels[3]


@pytest.mark.slow
def test_every_engine_of_a_chain_rebuilds_buckets_from_deltas():
    chain = Chain(3, 2, delta=True, full_every=3)
    for version in range(5):
        publish = changing(version)
        assert all(found == publish.payloads for found in chain.publish(publish))
    assert all(len(inbox._baselines) == len(publish.payloads) for engine in chain.engines for inbox in engine)


def test_a_loaders_views_are_unchanged_by_the_next_publish():
    chain = Chain(2, 1, delta=True)
    first = changing(0)
    views: list[dict[int, torch.Tensor]] = []

    def views_of(inbox: GroupInbox) -> None:
        inbox.expect(first.manifest, timeout_s=20)
        views.append({bucket.index: inbox.take(bucket) for bucket in first.manifest.buckets})

    in_threads(
        *(lambda s=s, r=r: first.send(s, r) for s, r in zip(chain.senders, (4, 6), strict=True)),
        *(lambda i=inbox: views_of(i) for (inbox,) in chain.engines),
    )
    before = [{index: view.clone() for index, view in found.items()} for found in views]
    chain.publish(changing(1))
    for found, was in zip(views, before, strict=True):
        assert all(torch.equal(view, was[index]) for index, view in found.items())


@pytest.mark.slow
def test_a_modified_baseline_is_refused_and_named():
    chain = Chain(2, 1, delta=True)
    chain.publish(changing(0))
    first, last = (inbox for (inbox,) in chain.engines)
    last._baselines[0][1][1] ^= 1  # the publish below changes byte 0
    publish = changing(1)
    _, _, found, message = in_threads(
        *(lambda s=s, r=r: publish.send(s, r) for s, r in zip(chain.senders, (4, 6), strict=True)),
        lambda: raw(first, publish),
        lambda: refusal(lambda: raw(last, publish)),
    )
    assert found == publish.payloads
    assert "bucket 0: checksum" in message


@pytest.mark.slow
def test_an_engine_behind_a_closed_one_names_it_and_engines_before_it_get_all_buckets():
    chain = Chain(3, 1, timeout_s=12)
    publish = publish_of_ranks_4_and_6(0)
    chain.engines[1][0].close()
    behind = chain.engines[2][0]
    behind.expect(publish.manifest, timeout_s=2)
    _, _, found, message = in_threads(
        *(lambda s=s, r=r: publish.send(s, r) for s, r in zip(chain.senders, (4, 6), strict=True)),
        lambda: raw(chain.engines[0][0], publish, timeout_s=12),
        lambda: refusal(lambda: behind.take(publish.manifest.buckets[0])),
    )
    assert found == publish.payloads
    assert "engine rank 0 waited in vain" in message and "for engine 1's rank 0 to send bucket 0" in message


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


def test_prefetch_reads_at_most_its_window_ahead():
    taken: list[int] = []

    class Source:
        def take(self, bucket):
            taken.append(bucket.index)
            return torch.zeros(1, dtype=torch.uint8)

    buckets = [Bucket(index=index, source_rank=0, num_bytes=100, pieces=()) for index in range(20)]
    ahead = Prefetch(Source(), buckets, window=2)
    ahead.take(buckets[0])
    ahead.take(buckets[1])
    deadline = time.monotonic() + 5
    while len(taken) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert taken == [0, 1, 2, 3], "two were used, two wait"
    assert ahead.arrived()
    ahead.close()


# -- hand-over -----------------------------------------------------------------------------------------


class Exchange:
    """Trainer ranks as threads, with a gloo group of bare objects between them."""

    def __init__(
        self, publish: Publish, hosted: list[list[int]], *, timeout_s: float = 20, nodes: Sequence[str] = ()
    ) -> None:
        self.store = StoreServer("127.0.0.1")
        self.hosted = hosted
        world = len(hosted)
        # every rank joins as a source, so the group is one of trainer ranks only
        channel = GroupChannel(
            store=self.store.address,
            source_ranks=tuple(range(world)),
            num_engine_ranks=0,
            timeout_s=20,
        )
        groups = in_threads(*(lambda r=rank: join(channel, r) for rank in range(world)))
        self.senders = [
            ColocatedSender(
                ShmRegion(run_id=RUN_ID, rank=rank),
                group,
                run_id=RUN_ID,
                rank=rank,
                hosted=hosted,
                buckets=publish.manifest.buckets,
                backend="gloo",
                timeout_s=timeout_s,
                nodes=nodes,
            )
            for rank, group in enumerate(groups)
        ]

    def send(self, publish: Publish) -> list[str]:
        return in_threads(*(lambda s=s, r=r: publish.send(s, r) for r, s in enumerate(self.senders)))

    def inbox(self, publish: Publish, addresses: list[str], *, host: int, engine_rank: int) -> ColocatedInbox:
        shared = {"engine_rank": engine_rank, "shared_with": self.hosted[host]}
        return ColocatedInbox(publish.manifest, map_shm(publish.manifest, addresses[host], **shared), **shared)

    def abandon(self) -> None:
        for sender in self.senders:
            sender.abandon()


HALVES = [
    {"layers.0.q_proj.weight": (Box(start=(0, 0), shape=(32, 16)),)},
    {"layers.0.q_proj.weight": (Box(start=(32, 0), shape=(32, 16)),)},
]
HALVES = [{name: half.get(name, ()) for name in tensors()} for half in HALVES]


@pytest.mark.parametrize(
    ("hosted", "nodes"),
    [
        ([[0], [1]], ""),
        ([[1], [0]], ""),
        ([[0, 1], []], ""),
        ([[], [0, 1], []], ""),
        ([[0], [1], [0]], ""),
        ([[0], [1], [0], [1], [0, 1]], "aabbb"),
        ([[], [], [0, 1], [0, 1], [0, 1], [0, 1]], "abaabb"),
    ],
    ids=[
        *("in order", "crossed", "all on one", "ranks that host nothing", "a rank without buckets"),
        *("passed on by one rank of the other node", "passed on by different ranks of both nodes"),
    ],
)
@pytest.mark.parametrize("bucket_bytes", [64, 1000])
def test_each_device_gets_only_the_buckets_that_its_engine_ranks_require(hosted, nodes, bucket_bytes):
    publish = pack(tensors(), 0, "int8", num_ranks=2, bucket_bytes=bucket_bytes, required=HALVES)
    exchange = Exchange(publish, hosted, nodes=nodes)
    for version in (0, 1):
        publish = pack(tensors(), version, "int8", num_ranks=2, bucket_bytes=bucket_bytes, required=HALVES)
        addresses = exchange.send(publish)
        for host, engine_ranks in enumerate(hosted):
            assert bool(addresses[host]) == bool(engine_ranks)
            shared = [b for b in publish.manifest.buckets if any(b.required_by(r) for r in engine_ranks)]
            if engine_ranks:
                assert Path(addresses[host]).stat().st_size == files.bucket_offsets(shared)[1]
            for rank in engine_ranks:
                inbox = exchange.inbox(publish, addresses, host=host, engine_rank=rank)
                received = ReceivedPieces(publish.manifest, inbox, engine_rank=rank)
                (box,) = HALVES[rank]["layers.0.q_proj.weight"]
                expected = tensors()["layers.0.q_proj.weight"][box.slices((0, 0))]
                assert torch.equal(received.read("layers.0.q_proj.weight", box), expected)
                norm = Box(start=(0,), shape=(16,))
                assert torch.equal(received.read("layers.0.norm.weight", norm), tensors()["layers.0.norm.weight"])
        exchange.abandon()
    assert not [path for path in files.SHM.iterdir() if RUN_ID in path.name]


def test_a_corrupt_bucket_is_refused_by_its_engine_rank_before_it_is_applied():
    publish = pack(tensors(), 0, "int8", num_ranks=2, bucket_bytes=1000, required=HALVES)
    exchange = Exchange(publish, [[0, 1], []])
    addresses = exchange.send(publish)
    only_of_1 = next(b for b in publish.manifest.buckets if b.engine_ranks == (1,))
    offsets, _ = files.bucket_offsets(publish.manifest.buckets)
    with Path(addresses[0]).open("r+b") as file:
        file.seek(offsets[only_of_1.index])
        byte = file.read(1)
        file.seek(offsets[only_of_1.index])
        file.write(bytes([byte[0] ^ 1]))
    exchange.inbox(publish, addresses, host=0, engine_rank=0)
    with pytest.raises(RuntimeError, match=f"bucket {only_of_1.index}: checksum"):
        exchange.inbox(publish, addresses, host=0, engine_rank=1)
    later = pack(tensors(), 1, "int8", num_ranks=2, bucket_bytes=1000, required=HALVES)
    with pytest.raises(RuntimeError, match="carries weight version 0, the manifest says 1"):
        exchange.inbox(later, addresses, host=0, engine_rank=0)
    exchange.abandon()


def test_a_colocated_trainer_rank_that_sends_nothing_is_named():
    publish = pack(tensors(), 0, "int8", num_ranks=2, bucket_bytes=1000, required=HALVES)
    exchange = Exchange(publish, [[0], [1]], timeout_s=1)
    with pytest.raises(RuntimeError, match=r"trainer rank 0 waited in vain .* for trainer rank 1 to send bucket"):
        publish.send(exchange.senders[0], 0)
    exchange.abandon()


def test_a_shared_memory_file_is_complete_after_short_writes() -> None:
    content = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    segment, pwrite = files.SegmentFile(run_id="pieces", rank=0), os.pwrite
    segment.begin(WeightVersion(1), 1200)
    try:
        with patch.object(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:77], offset)):
            segment.write(memoryview(content), 100)
        found = np.frombuffer(Path(segment.show()).read_bytes(), dtype=np.uint8)
    finally:
        segment.remove()
    assert np.array_equal(found, np.concatenate([np.zeros(100), content, np.zeros(100)]))


def test_a_shared_memory_file_without_room_is_refused_before_and_during_writing() -> None:
    segment = files.SegmentFile(run_id="noroom", rank=0)
    with pytest.raises(RuntimeError, match=r"/dev/shm has no room for \d+ bytes .*publish.transport=gloo"):
        segment.begin(WeightVersion(1), 1 << 60)
    segment.begin(WeightVersion(1), 100)
    full = OSError(errno.ENOSPC, "full")
    with patch.object(os, "pwrite", side_effect=full), pytest.raises(RuntimeError, match="has no room for 100 bytes"):
        segment.write(memoryview(bytes(100)), 0)
    segment.remove()
    assert not list(files.SHM.glob(".mrl-noroom-*"))
