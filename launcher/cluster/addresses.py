"""The IPv4 address that a node uses: overridden by name, of a named interface, or of the node's own name. Pure but for
`interfaces` and `resolve`.
"""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from launcher.config.slurm import SlurmConfig


def node_address(node: str, slurm: SlurmConfig, *, present: Mapping[str, str], resolved: str) -> tuple[str, str]:
    """Address of `node` and the interface that has it.

    Args:
        node: name of this node.
        slurm: `addresses` and `interface` are read.
        present: IPv4 address by interface name.
        resolved: address of the node's name; empty where the name is unknown.

    Raises:
        ValueError: the wanted interface or address is not on this node.
    """
    listed = ", ".join(f"{name} {address}" for name, address in sorted(present.items())) or "none"
    by_address = {address: name for name, address in present.items()}
    if node in slurm.addresses:
        address = slurm.addresses[node]
        if address not in by_address:
            raise ValueError(f"`cluster.slurm.addresses.{node}` = {address} is not on that node; it has: {listed}")
        return address, by_address[address]
    if slurm.interface:
        if slurm.interface not in present:
            raise ValueError(f"`cluster.slurm.interface` = {slurm.interface} is not on {node}; it has: {listed}")
        return present[slurm.interface], slurm.interface
    if resolved in by_address and not ipaddress.ip_address(resolved).is_loopback:
        return resolved, by_address[resolved]
    outside = {address: name for address, name in by_address.items() if not ipaddress.ip_address(address).is_loopback}
    if len(outside) != 1:
        raise ValueError(
            f"{node}: its name leads to {resolved or 'no address'}, and it has the addresses: {listed}; "
            "set `cluster.slurm.interface`"
        )
    return next(iter(outside.items()))


def interfaces() -> dict[str, str]:
    """IPv4 address of each interface that has one."""
    return {
        name: found[0]
        for name, addresses in psutil.net_if_addrs().items()
        if (found := [one.address for one in addresses if one.family == socket.AF_INET])
    }


def resolve(node: str) -> str:
    """IPv4 address of a node's name; empty where it is unknown."""
    try:
        return socket.gethostbyname(node)
    except OSError:
        return ""
