"""Ports of a job on its nodes: a block that follows from the job's id, outside the ephemeral range, tried before use.

The kernel gives ports of the ephemeral range to any client, so a fixed port in it may be taken at any time. Two jobs
have different blocks unless their ids are equal modulo the number of blocks; then the second job finds the first
block in use and takes another one. Pure except for `is_free`, `free_ports` and `ephemeral_range`.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FIRST, LAST = 10_240, 65_535
"""Ports below 10,240 belong to well-known services."""
BLOCK = 200
"""Ports of a job on one node: 20 for Ray's services, the others for its workers."""
_SERVICES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PortMap:
    """Ports of one job on one node."""

    base: int
    """First port of the block."""

    @property
    def gcs(self) -> int:
        """Ray's head service."""
        return self.base

    @property
    def node_manager(self) -> int:
        """Ray's raylet. It listens later than the head service: then the node can be joined."""
        return self.base + 1

    @property
    def probe(self) -> int:
        """Where a node listens while nodes try to reach each other, before Ray starts."""
        return self.base + 12

    @property
    def rendezvous(self) -> int:
        """Of the first node, in the all-reduce before Ray starts."""
        return self.base + 13

    @property
    def metrics(self) -> dict[str, str]:
        """Variables with the ports of Ray's own metrics, which no option of `ray start` sets."""
        return {"AUTOSCALER_METRIC_PORT": str(self.base + 14), "DASHBOARD_METRIC_PORT": str(self.base + 15)}

    @property
    def workers(self) -> tuple[int, int]:
        """First and last port of Ray's workers."""
        return self.base + _SERVICES, self.base + BLOCK - 1

    def options(self, *, head: bool) -> list[str]:
        """Options of `ray start` that bind every service to a port of the block."""
        first, last = self.workers
        services = ["--object-manager-port", "--dashboard-agent-listen-port"]
        services += ["--dashboard-agent-grpc-port", "--runtime-env-agent-port", "--metrics-export-port"]
        numbered = [f"{option}={self.base + 1 + number}" for number, option in enumerate(services, start=1)]
        numbered.append(f"--node-manager-port={self.node_manager}")
        if head:
            numbered += [f"--port={self.gcs}", f"--ray-client-server-port={self.base + 10}"]
            numbered += [f"--dashboard-port={self.base + 11}"]
        return [*numbered, f"--min-worker-port={first}", f"--max-worker-port={last}"]


def port_maps(job_id: int, *, ephemeral: tuple[int, int]) -> Iterator[PortMap]:
    """All blocks outside the `ephemeral` range (first and last port), that of the job first.

    Raises:
        ValueError: the ephemeral range leaves no room for a block.
    """
    low, high = ephemeral
    bases = [
        *range(FIRST, min(low, LAST + 1) - BLOCK + 1, BLOCK),
        *range(max(high + 1, FIRST), LAST - BLOCK + 2, BLOCK),
    ]
    if not bases:
        raise ValueError(
            f"the ephemeral range {low}-{high} leaves no block of {BLOCK} ports above {FIRST}: narrow "
            "net.ipv4.ip_local_port_range on the nodes, for example to 32768-60999"
        )
    for number in range(len(bases)):
        yield PortMap(base=bases[(job_id + number) % len(bases)])


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel of this node gives to clients."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
    return int(low), int(high)


def is_free(port: int) -> bool:
    """Whether this node can listen on `port`."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


def free_ports(job_id: int) -> PortMap:
    """The first block of the job of which this node can use every port.

    Raises:
        ValueError: there is none; the message names the ports that were tried.
    """
    low, high = ephemeral_range()
    tried = 0
    for ports in port_maps(job_id, ephemeral=(low, high)):
        tried += 1
        if all(is_free(port) for port in range(ports.base, ports.base + BLOCK)):
            return ports
    raise ValueError(
        f"none of {tried} blocks of {BLOCK} ports outside {low}-{high} is free on {socket.gethostname()}; end what "
        "listens there (`ss -tlnp`)"
    )
