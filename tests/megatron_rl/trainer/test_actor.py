"""Calls of a trainer rank's actor that need no model."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_rl.trainer.actor import TrainerActor


def test_a_transport_that_is_opened_again_leaves_no_group_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a group, and NCCL its memory, until the group is destroyed."""
    living: list[object] = []

    def new_group(ranks: list[int], backend: str) -> object:
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
