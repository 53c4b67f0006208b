"""Calls of a trainer rank's actor that need no model."""

from datetime import timedelta
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from history.patience import NEVER
from megatron_rl.model import parallel
from megatron_rl.trainer.actor import TrainerActor
from rollout.processes import on_devices
from rollout.transports.base import GroupChannel
from rollout.transports.shm_files import segment_path
from rollout.transports.store_server import StoreServer
from rollout.types import WeightVersion


def test_a_transport_that_is_opened_again_leaves_no_group_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a group, and NCCL its memory, until the group is destroyed."""
    living: list[object] = []

    def new_group(ranks: list[int], timeout: timedelta, backend: str) -> object:
        assert timeout == NEVER, "torch's clock goes on while the job is suspended"
        group = SimpleNamespace(ranks=ranks, backend=backend)
        living.append(group)
        return group

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "destroy_process_group", living.remove)
    rank = TrainerActor.__new__(TrainerActor)
    rank._rank, rank._sender, rank._colocated_group = 0, None, None
    rank._spec = SimpleNamespace(run_id="test-actor", publish=SimpleNamespace(timeout_s=1.0))
    rank._trainer = SimpleNamespace(publishes=SimpleNamespace(plan=SimpleNamespace(buckets=())))
    for _ in range(3):
        rank.open_colocated([[0], [1]], "shm", ["node", "node"])
    assert [group.ranks for group in living] == [[0, 1]]


def test_an_engine_that_never_joins_is_a_fault_and_no_error_of_the_rank() -> None:
    rank = TrainerActor.__new__(TrainerActor)
    rank._rank, rank._sender = 3, None
    publish = SimpleNamespace(timeout_s=0.5, delta=False, delta_full_every=0)
    rank._spec = SimpleNamespace(run_id="test-actor", publish=publish)
    store = StoreServer("127.0.0.1")
    channel = GroupChannel(store=store.address, source_ranks=(2, 3), num_engine_ranks=1, timeout_s=0.5)
    fault = rank.attach_group(0, channel)
    assert "trainer rank 3 waited 0.5 s" in fault and "for trainer rank 2, engine rank 0 to join" in fault
    assert rank._sender is None
    rank._rank = 1
    assert rank.attach_group(0, channel) == "", "it sends nothing"
    assert rank._sender is not None


def test_a_rank_whose_slot_has_a_device_refuses_to_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in on_devices(["5"]).items():
        monkeypatch.setenv(name, value)
    rank = TrainerActor.__new__(TrainerActor)
    rank._rank, rank._world = 2, object()
    rank._spec = SimpleNamespace(config=SimpleNamespace(parallel=None, timeout_s=1.0, cpu_threads=1), seed=0)
    with pytest.raises(RuntimeError, match=r"trainer rank 2 is placed on GPU 5, which torch .* cannot use"):
        rank.join("127.0.0.1", 1)


def test_collectives_have_no_limit_by_a_clock_that_goes_on_while_the_job_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    def initialize(*args: object, timeout_s: float, **more: object) -> NoReturn:
        limits.append(timeout_s)
        raise RuntimeError("enough")

    monkeypatch.setattr(parallel, "initialize", initialize)
    rank = TrainerActor.__new__(TrainerActor)
    rank._rank, rank._world = 0, object()
    rank._spec = SimpleNamespace(config=SimpleNamespace(parallel=None, timeout_s=1.0, cpu_threads=1), seed=0)
    with pytest.raises(RuntimeError, match="enough"):
        rank.join("127.0.0.1", 1)
    assert limits == [NEVER.total_seconds()]


def test_a_rank_that_starts_removes_what_a_killed_one_has_left_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = segment_path(run_id="test-actor-killed", pid=1 << 30, weight_version=WeightVersion(3), rank=0)
    left.write_bytes(b"x")
    for of_the_process in (
        "megatron_rl.trainer.actor.redirect_output",
        "megatron_rl.trainer.actor.write_stacks_on_signal",
        "rollout.progress.open_page",
        "megatron_rl.cpu.shim.install",
    ):
        monkeypatch.setattr(of_the_process, lambda: None)
    try:
        TrainerActor(SimpleNamespace(), 0)
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)
