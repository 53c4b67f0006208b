"""Test nodes for transports: network namespaces of this machine, each with an interface `eth0`, joined by a bridge.

Needs root and Debian's iproute2. Processes on a node share this machine's files, memory and shared memory.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SUBNET = "10.79.0"
PREFIX = "mrl-bench-"
_SWITCH = f"{PREFIX}switch"


def address(node: int) -> str:
    """IPv4 address of a node."""
    return f"{SUBNET}.{node + 1}"


def inside(node: int) -> list[str]:
    """Words before a command that runs in the network of a node."""
    return ["nsenter", f"--net=/run/netns/{PREFIX}{node}"]


def sent_bytes(num_nodes: int) -> int:
    """Bytes that all nodes have sent over their interfaces, headers included."""
    return sum(_sent(_output(*inside(node), "cat", "/proc/net/dev")) for node in range(num_nodes))


def _sent(devices: str) -> int:
    """The ninth counter of `eth0` in `/proc/net/dev`: bytes that were transmitted."""
    (counters,) = [line.partition(":")[2].split() for line in devices.splitlines() if line.strip().startswith("eth0:")]
    return int(counters[8])


@contextmanager
def network(num_nodes: int) -> Iterator[None]:
    """The nodes, for the body."""
    names = [_SWITCH, *(f"{PREFIX}{node}" for node in range(num_nodes))]
    _remove(names)  # of a benchmark that was killed
    try:
        for name in names:
            _output("ip", "netns", "add", name)
        _output("ip", "-n", _SWITCH, "link", "add", "br0", "type", "bridge")
        _output("ip", "-n", _SWITCH, "link", "set", "br0", "up")
        for node, name in enumerate(names[1:]):
            _output(
                "ip", "-n", _SWITCH, "link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", name
            )
            _output("ip", "-n", _SWITCH, "link", "set", f"v{node}", "master", "br0", "up")
            _output("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")
            _output("ip", "-n", name, "link", "set", "eth0", "up")
            _output("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        _remove(names)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
