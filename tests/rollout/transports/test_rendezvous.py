"""NCCL groups of transports, over a stand-in for torch's class: a peer's death must not end this process."""

import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rollout.failures import DeadlineError
from rollout.transports import rendezvous
from rollout.transports.base import GroupChannel, StoreAddress
from rollout.transports.secret_store import SecretStore
from rollout.transports.store_server import StoreServer

NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
CHANNEL = GroupChannel(
    backend="nccl",
    store=StoreAddress(host="127.0.0.1", port=1, secret=b""),
    source_ranks=(0,),
    num_engine_ranks=2,
    timeout_s=20,
)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", [None, "0"])
def test_torch_watches_no_group_of_a_transport_and_keeps_its_setting_for_others(
    monkeypatch: pytest.MonkeyPatch, before: str | None, fails: bool
) -> None:
    made = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
            made.append((os.environ[NO_WATCHDOG], rank, size))
            if fails:
                raise RuntimeError("no GPUs found")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    if before is None:
        monkeypatch.delenv(NO_WATCHDOG, raising=False)
    else:
        monkeypatch.setenv(NO_WATCHDOG, before)
    with pytest.raises(RuntimeError, match="no GPUs found") if fails else nullcontext():
        rendezvous._nccl_group(None, 1, CHANNEL)
    assert made == [("1", 1, 3)]
    assert os.environ.get(NO_WATCHDOG) == before


def test_a_peer_that_ends_before_it_has_a_communicator_is_named_and_the_group_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *args: object) -> None:
            pass

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
            raise dist.DistBackendError("NCCL error: remote process exited")

        def abort(self) -> None:
            left.append("left")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(rendezvous, "device_of", lambda backend: torch.device("cpu"))
    server = StoreServer("127.0.0.1")
    others = SecretStore(server.address, timeout_s=20)
    for rank in (1, 2):
        others.set(f"present/{rank}", "1")
    said = "trainer rank 0 could not meet engine rank 0: DistBackendError: NCCL error: remote process exited"
    with pytest.raises(DeadlineError, match=said):
        rendezvous.join(replace(CHANNEL, store=server.address), 0)
    assert left == ["left"]
