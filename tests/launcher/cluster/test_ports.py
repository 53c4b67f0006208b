import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster.ports import BLOCK, FIRST, LAST, free_ports, is_free, port_maps

LINUX = (32768, 60999)


@given(job=st.integers(1, 10**8), low=st.integers(11_000, 60_000), width=st.integers(1000, 60_000))
def test_blocks_lie_outside_the_ephemeral_range_and_do_not_overlap(job: int, low: int, width: int) -> None:
    high = min(low + width, LAST)
    bases = sorted(ports.base for ports in port_maps(job, ephemeral=(low, high)))
    assert all(later - earlier >= BLOCK for earlier, later in pairwise(bases))
    for base in bases:
        assert base >= FIRST and base + BLOCK - 1 <= LAST
        assert base + BLOCK - 1 < low or base > high


def test_consecutive_jobs_have_different_blocks() -> None:
    assert len({next(port_maps(job, ephemeral=LINUX)).base for job in range(100, 150)}) == 50


def test_every_service_and_worker_has_a_port_of_its_own_in_the_block() -> None:
    ports = next(port_maps(4711, ephemeral=LINUX))
    options = dict(option.split("=") for option in ports.options(head=True))
    first, last = int(options.pop("--min-worker-port")), int(options.pop("--max-worker-port"))
    services = {int(port) for port in options.values()}
    assert len(services) == len(options) == 9
    assert all(ports.base <= port < first for port in services)
    assert last == ports.base + BLOCK - 1
    assert options.keys() - dict(option.split("=") for option in ports.options(head=False)).keys() == {
        *("--port", "--ray-client-server-port", "--dashboard-port")
    }


def test_a_block_with_a_port_in_use_is_passed_over() -> None:
    free = free_ports(17)
    with socket.socket() as held:
        held.bind(("", free.base + 3))
        held.listen()
        assert not is_free(free.base + 3)
        other = free_ports(17)
    assert other.base != free.base


def test_an_ephemeral_range_that_leaves_nothing_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="1024-65535 leaves no block of 200 ports"):
        next(port_maps(1, ephemeral=(1024, 65535)))
