"""Starts a Ray cluster of three nodes on this machine, joins it as a command does, and prints where processes run.

The suite's own process is connected to another Ray cluster, so this is a script. It prints one JSON object.
"""

import json
from collections.abc import Callable

import ray
from ray.cluster_utils import Cluster

from history.types import HistoryPlaces
from launcher.cluster import ray_cluster
from launcher.cluster.processes import Processes, processes
from launcher.cluster.ray_cluster import joined_nodes, reserve
from launcher.config.schema import ClusterConfig
from rollout.failures import DeadlineError

RACK = {"rack": "leaf3", "block": "spine"}


class Probe:
    """An actor that tells its node."""

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def probe(running: Processes, node: str) -> str:
    """Ray's id of the node on which an actor in the bundle of `node` runs."""
    strategy = running._strategy(node)
    actor = ray.remote(Probe).options(num_cpus=running._num_cpus, scheduling_strategy=strategy).remote()
    return str(ray.get(actor.node_id.remote()))


def refusal(call: Callable[[], object]) -> str:
    """Message of the error that a call raises; empty without an error."""
    try:
        call()
    except (RuntimeError, DeadlineError) as error:
        return str(error)
    return ""


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "node2", "labels": RACK})
    cluster.add_node(num_cpus=2, node_name="node10")
    cluster.add_node(num_cpus=2, node_name="node9")
    config = ClusterConfig(address=cluster.address, min_nodes=3)
    nodes = joined_nodes(config)
    history = HistoryPlaces(shards=("node9",), readers=("node2", "node9"))
    placed = {"node2": 2, "node9": 1}
    with processes(config, num_actors=0, log_dir=None, nodes=nodes, placed=placed, history=history) as running:
        reservation = running.reservation
        assert reservation is not None
        ids = reservation.node_ids
        ray_cluster.ANSWER_TIMEOUT_S = 1.0
        answer = {
            "names": [node.name for node in nodes],
            "racks": [node.rack for node in nodes],
            "cores": [node.cpu_cores for node in nodes],
            "used": [node.name for node in running.nodes],
            "right": {node: [probe(running, node) == ids[node] for _ in range(2)] for node in placed},
            "history": running._history_places() == HistoryPlaces(shards=(ids["node9"],), readers=tuple(ids.values())),
            "swapped": refusal(lambda: reservation.check("engine", ["node2", "node9"], [*ids.values()][::-1])),
            "full": refusal(lambda: reserve(running.nodes, placed)),
        }
    cluster.shutdown()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
