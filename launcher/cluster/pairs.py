"""Whether nodes reach each other, before Ray starts: a connection for each pair, then a sum over all nodes.

Nodes find each other by files in a folder that all of them see. Every node listens, waits for the others, and connects
to each of them and to itself. A pair that cannot connect is known by name; a sum over all nodes alone only hangs.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from history.patience import AwakeClock
from launcher.run_dir.atomic_files import replace_text
from rollout.failures import DeadlineError

CONNECT_TIMEOUT_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a node listens."""

    node: str
    address: str
    """IPv4 address."""
    port: int


def unreachable_nodes(folder: Path, here: Endpoint, nodes: Sequence[str], *, timeout_s: float) -> list[str]:
    """The `nodes` that this node cannot connect to.

    Nodes that never appear in `folder` are left out. So are nodes that have stopped to listen without having waited for
    this one: its check started late, as where an image is unpacked first. The sum over nodes tests such pairs.

    Args:
        folder: seen by all nodes; empty at the start.
        here: this node, which is one of `nodes`.
        nodes: names of all nodes.
        timeout_s: time for which this node waits for others to listen, and then for others to connect.

    Raises:
        ValueError: this node cannot listen at its address and port.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        listener = socket.create_server((here.address, here.port), backlog=len(nodes) + 8)
    except OSError as error:
        raise ValueError(f"cannot listen at {here.address}:{here.port}: {error.strerror}; open that port") from error
    with listener:
        replace_text(folder / f"{here.node}.address", f"{here.address} {here.port}\n")
        present = _wait_for(folder, "address", nodes, timeout_s)
        failed = [node for node in present if not _connects(folder / f"{node}.address")]
        replace_text(folder / f"{here.node}.done", "".join(f"{node}\n" for node in present))
        _wait_for(folder, "done", present, timeout_s)  # others still connect to this node
    return [node for node in failed if not _has_gone(folder / f"{node}.done", here.node)]


def reduce_over_nodes(
    node: str, nodes: Sequence[str], rendezvous: Sequence[str], interface: str, timeout_s: float
) -> str:
    """Sum a number over all nodes in a child process, because torch is not imported here; returns its line.

    Args:
        node: this node, one of `nodes`.
        nodes: names of all nodes; their order is that of the ranks.
        rendezvous: address and port at the first node.
        interface: network interface that gloo and NCCL use.
        timeout_s: deadline of the whole.

    Raises:
        DeadlineError: the sum failed or is late; the message names the nodes that this node missed.
    """
    address, port = rendezvous
    sum_timeout_s = timeout_s / 2  # the rest is for importing torch
    arguments = [str(nodes.index(node)), str(len(nodes)), address, port, str(sum_timeout_s)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rollout.transports.all_reduce", *arguments],
            env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"no result after {timeout_s:.0f} s"
    else:
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no message"]
        if done.returncode == 0:
            return lines[-1]
        reason = _with_names(next((line for line in lines if "monitoredBarrier" in line), lines[-1]), nodes)
    raise DeadlineError(
        f"{node}: the sum over {', '.join(nodes)} has failed within {sum_timeout_s:.0f} s: {reason}; gloo and NCCL use "
        f"the first address of {interface} here (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME): open that network between "
        "these nodes for all ports, or set `cluster.slurm.interface`"
    )


def _with_names(message: str, nodes: Sequence[str]) -> str:
    """A message of gloo's monitored barrier with node names in the place of ranks."""
    return re.sub(
        r"Ranks? (\d+(?:, ?\d+)*)",
        lambda match: ", ".join(nodes[int(rank)] for rank in match[1].split(",")),
        message,
    )


def _wait_for(folder: Path, suffix: str, nodes: Sequence[str], timeout_s: float) -> list[str]:
    """Those of `nodes` that have written their file, once all have or the time is over."""
    clock = AwakeClock()
    while True:
        present = [node for node in nodes if (folder / f"{node}.{suffix}").exists()]
        if len(present) == len(nodes) or clock() > timeout_s:
            return present
        time.sleep(_POLL_S)


def _has_gone(file: Path, node: str) -> bool:
    """Whether the writer of this file stopped listening without having waited for `node`."""
    return file.exists() and node not in file.read_text(encoding="utf-8").split()


def _connects(file: Path) -> bool:
    address, port = file.read_text(encoding="utf-8").split()
    try:
        with socket.create_connection((address, int(port)), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
