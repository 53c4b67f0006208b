"""The IPv4 address that a node uses: overridden by name, of a named interface, or of the node's own name. Pure but for
`interfaces` and `resolve`.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence

import psutil

from launcher.config.slurm import SlurmConfig


def node_address(
    node: str, slurm: SlurmConfig, *, present: Mapping[str, Sequence[str]], resolved: str
) -> tuple[str, str]:
    """Address of `node` and the interface that has it.

    Args:
        node: name of this node.
        slurm: `addresses` and `interface` are read.
        present: IPv4 addresses by interface name, at least one each, in the order of the kernel.
        resolved: address of the node's name; empty where the name is unknown.

    Raises:
        ValueError: the wanted interface or address is not on this node.
    """
    listed = ", ".join(f"{name} {address}" for name in sorted(present) for address in present[name]) or "none"
    by_address = {address: name for name, found in present.items() for address in found}
    if node in slurm.addresses:
        address = slurm.addresses[node]
        if address not in by_address:
            raise ValueError(f"`cluster.slurm.addresses.{node}` = {address} is not on that node; it has: {listed}")
        return address, by_address[address]
    if slurm.interface:
        if slurm.interface not in present:
            raise ValueError(f"`cluster.slurm.interface` = {slurm.interface} is not on {node}; it has: {listed}")
        found = present[slurm.interface]
        return resolved if resolved in found else found[0], slurm.interface
    # gloo and NCCL take the first address of an interface, so further ones of the loopback interface reach no node
    outside = {name: found for name, found in present.items() if not ipaddress.ip_address(found[0]).is_loopback}
    if resolved in by_address and by_address[resolved] in outside:
        return resolved, by_address[resolved]
    if len(outside) != 1:
        raise ValueError(
            f"{node}: its name leads to {resolved or 'no address'}, and it has the addresses: {listed}; "
            "set `cluster.slurm.interface`"
        )
    ((name, found),) = outside.items()
    return found[0], name


def interfaces() -> dict[str, tuple[str, ...]]:
    """IPv4 addresses of each interface that has one."""
    return {
        name: found
        for name, addresses in psutil.net_if_addrs().items()
        if (found := tuple(one.address for one in addresses if one.family == socket.AF_INET))
    }


def resolve(node: str) -> str:
    """IPv4 address of a node's name; empty where it is unknown."""
    try:
        return socket.gethostbyname(node)
    except OSError:
        return ""
