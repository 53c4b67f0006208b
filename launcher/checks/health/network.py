"""The network: this node listens at its address and reaches every node of the SLURM step, itself included."""

from collections.abc import Sequence
from pathlib import Path

from launcher.cluster.pairs import Endpoint, unreachable_nodes

TIMEOUT_S = 30.0
"""For which a node waits for the other nodes of the step."""


def network_line(folder: Path, here: Endpoint, nodes: Sequence[str]) -> tuple[str, list[str]]:
    """Value and problems; `folder` is seen by all `nodes` and empty at the start.

    Raises:
        ValueError: this node cannot listen at its address and port.
    """
    failed = unreachable_nodes(folder, here, nodes, timeout_s=TIMEOUT_S)
    silent = [node for node in nodes if not (folder / f"{node}.address").exists()]
    problems = [
        f"{here.node} cannot connect to {node}; open the network between the two, or set `cluster.slurm.interface`"
        for node in failed
    ]
    problems += [f"{node} wrote no file in {folder}; mount the run directory there, or start it" for node in silent]
    return f"{here.address}:{here.port}, {len(nodes)} node(s)", problems
