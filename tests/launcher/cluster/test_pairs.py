"""Nodes of one machine, as threads: connections of every pair, and a sum in a process of each node."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.cluster.pairs import Endpoint, reduce_over_nodes, unreachable_nodes
from launcher.cluster.ports import free_ports, port_maps
from rollout.failures import DeadlineError
from tests.support.deadline import DEADLINE_S

NODES = ("n1", "n2", "n3")


def test_nodes_that_listen_reach_each_other(tmp_path: Path) -> None:
    first = free_ports(11).base
    endpoints = [Endpoint(node=node, address="127.0.0.1", port=first + number) for number, node in enumerate(NODES)]
    with ThreadPoolExecutor(len(NODES)) as threads:
        tries = [threads.submit(unreachable_nodes, tmp_path, one, NODES, timeout_s=DEADLINE_S) for one in endpoints]
    assert [attempt.result() for attempt in tries] == [[], [], []]


def test_a_port_in_use_is_refused_by_address(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot listen at 192\.0\.2\.1:4711"):
        unreachable_nodes(tmp_path, Endpoint(node="n1", address="192.0.2.1", port=4711), ["n1"], timeout_s=1)


def test_the_sum_over_two_nodes_is_right() -> None:
    rendezvous = ["127.0.0.1", str(free_ports(12).rendezvous)]
    with ThreadPoolExecutor(2) as threads:
        sums = [
            threads.submit(reduce_over_nodes, node, ["n1", "n2"], rendezvous, "lo", DEADLINE_S) for node in ("n1", "n2")
        ]
    assert [done.result() for done in sums] == ["a sum over 2 node(s) is right by gloo"] * 2


@pytest.mark.parametrize(
    ("waited_for", "unreachable"),
    [("n1\n", []), ("n1\nn2\n", ["n1"]), (None, ["n1"])],
    ids=["has gone", "has waited", "has not ended its tries"],
)
def test_a_node_that_did_not_wait_for_a_late_one_is_not_unreachable(
    tmp_path: Path, waited_for: str | None, unreachable: list[str]
) -> None:
    """Nothing listens at the port of n1. If it stopped before n2 came, that is no fault of the network."""
    ports = free_ports(14)
    (tmp_path / "n1.address").write_text(f"127.0.0.1 {ports.base}\n")
    if waited_for is not None:
        (tmp_path / "n1.done").write_text(waited_for)
    late = Endpoint(node="n2", address="127.0.0.1", port=ports.base + 1)
    assert unreachable_nodes(tmp_path, late, ["n1", "n2"], timeout_s=0.1) == unreachable
    assert (tmp_path / "n2.done").read_text().split() == ["n1", "n2"]


def test_a_failed_sum_names_the_interface_that_gloo_and_nccl_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(line: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(line, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(DeadlineError, match=r"the first address of ib0 here \(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"):
        reduce_over_nodes("n1", ["n1", "n2"], ["10.0.0.1", "1"], "ib0", 20.0)


@pytest.mark.slow
def test_a_node_that_does_not_take_part_ends_the_sum_with_its_deadline() -> None:
    rendezvous = ["127.0.0.1", str(free_ports(13).rendezvous)]
    with pytest.raises(DeadlineError, match="n1: the sum over n1, n2 has failed within 10 s"):
        reduce_over_nodes("n1", ["n1", "n2"], rendezvous, "lo", 20.0)


def test_ports_of_the_checks_belong_to_the_block_and_to_no_service() -> None:
    ports = next(port_maps(1, ephemeral=(32768, 60999)))
    used = {int(option.rpartition("=")[2]) for option in ports.options(head=True)}
    assert ports.base < ports.probe < ports.rendezvous < ports.workers[0]
    assert not {ports.probe, ports.rendezvous, *map(int, ports.metrics.values())} & used
