"""An actor that reads the progress pages (`rollout.progress`) of a node's processes for the controller.

It is a process of its own, so it answers while the processes that it reads hang. One call reads all of them.
"""

import socket
from collections.abc import Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.processes import ProcessId
from rollout.progress import Seen, look


class NodeReader:
    """Reads the pages of processes of its node."""

    def read(self, processes: Sequence[ProcessId]) -> tuple[str, list[Seen | None]]:
        """The name of the node, and each process as `rollout.progress.look` returns it."""
        return socket.gethostname(), [look(process.pid, process.page) for process in processes]


def start_reader(node_id: str) -> ray.actor.ActorHandle:
    """Start a reader on a node, by Ray's id; it needs no logical CPU."""
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor_class: ray.actor.ActorClass = ray.remote(NodeReader)
    return actor_class.options(num_cpus=0, scheduling_strategy=on_node).remote()
