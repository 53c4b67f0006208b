"""Starts a Ray cluster of three nodes on this machine, joins it as a command does, and prints where processes run.

The suite's own process is connected to another Ray cluster, so this is a script. It prints one JSON object.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import ray
from ray.cluster_utils import Cluster

from history.config import HistoryConfig
from history.store.service import Upkeep
from history.store.start import start_history
from history.types import HistoryPlaces
from launcher.cluster import alive_nodes, ray_cluster
from launcher.cluster.processes import Processes, processes
from launcher.cluster.ray_cluster import joined_nodes, reserve
from launcher.config.schema import ClusterConfig
from rollout.config import RewardConfig
from rollout.data.tokenizer import TokenizerSource
from rollout.failures import DeadlineError
from rollout.pool import scorer_pool
from rollout.types import ScorerAnswer
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.deadline import DEADLINE_S
from tests.support.scored_groups import scored_group

RACK = {"rack": "leaf3", "block": "spine"}


class Probe:
    """An actor that tells its node."""

    def node_id(self) -> str:
        return own_node_id()

    def tokens(self) -> np.ndarray:
        """More than Ray passes to the caller, so that they stay in the memory of this node."""
        return np.zeros(1 << 20, dtype=np.uint8)


def own_node_id() -> str:
    """Ray's id of the node on which this runs."""
    return str(ray.get_runtime_context().get_node_id())


def start_probe(running: Processes, node: str) -> ray.actor.ActorHandle:
    """An actor in the bundle of `node`."""
    strategy = running._strategy(node)
    return ray.remote(Probe).options(num_cpus=running._num_cpus, scheduling_strategy=strategy).remote()


def probe(running: Processes, node: str) -> str:
    """Ray's id of the node on which an actor in the bundle of `node` runs."""
    return str(ray.get(start_probe(running, node).node_id.remote()))


def refusal(call: Callable[[], object]) -> str:
    """Message of the error that a call raises; empty without an error."""
    try:
        call()
    except (RuntimeError, DeadlineError) as error:
        return str(error)
    return ""


def score(scorer: ray.actor.ActorHandle) -> str:
    """Ray's id of the node on which a group is scored."""
    made = scored_group(0)
    answer: ScorerAnswer = ray.get(scorer.score.remote(made.group, *made.columns), timeout=DEADLINE_S)
    return answer.process.node_id


def failure(scorer: ray.actor.ActorHandle, tokens: ray.ObjectRef) -> str:
    """Kind of the failure of a scorer that is given these tokens."""
    try:
        ray.get(scorer.score.remote(scored_group(0).group, tokens), timeout=DEADLINE_S)
    except ray.exceptions.RayError as error:
        return scorer_pool._kind(error).__name__
    return ""


def after_a_loss(running: Processes, cluster: Cluster, node: object) -> dict[str, object]:
    """node9 leaves, and node1 replaces it."""
    before = running.gone_nodes(suspects=["node2", "node9"])
    cluster.remove_node(node, allow_graceful=False)
    deadline = time.monotonic() + DEADLINE_S
    while not (gone := running.gone_nodes()):
        assert time.monotonic() < deadline
    spares = running.other_nodes()
    kept = [each for each in running.nodes if each.name not in gone]
    running.use_nodes([*kept, *spares], {"node2": 2, "node1": 1}, HistoryPlaces(shards=("node2",), readers=("node1",)))
    assert running.reservation is not None
    return {
        "before": before,
        "gone": gone,
        "replaced": [each.name for each in running.nodes],
        "right place": probe(running, "node1") == running.reservation.node_ids["node1"],
        "gone afterwards": running.gone_nodes(suspects=["node2", "node1"]),
    }


def shard_nodes(places: Sequence[str]) -> list[str]:
    """Ray's ids of the nodes on which shards run that were to start on these."""
    history = HistoryPlaces(shards=tuple(places), readers=())
    service = start_history(
        HistoryConfig(), directory="", fingerprint="", environment={}, upkeep=Upkeep(log=print), places=history
    )
    reports = ray.get([shard.report.remote() for shard in service.shards])
    service.close()
    return [report.process.node_id for report in reports]


def main() -> None:
    # Other tests of the suite may use all cores meanwhile: a node that is only slow is not lost.
    alive_nodes.SILENCE_S = alive_nodes.ANSWER_TIMEOUT_S = ray_cluster.ANSWER_TIMEOUT_S = DEADLINE_S
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "node2", "labels": RACK})
    cluster.add_node(num_cpus=2, node_name="node1", labels={alive_nodes.SPARE: "true"})
    node9 = cluster.add_node(num_cpus=2, node_name="node9")
    config = ClusterConfig(address=cluster.address, min_nodes=2)
    nodes, first = joined_nodes(config), joined_nodes(config.model_copy(update={"max_nodes": 2}))
    history = HistoryPlaces(shards=("node9",), readers=("node2", "node9"))
    placed = {"node2": 2, "node9": 1}
    with processes(config, num_actors=0, log_dir=None, nodes=nodes, placed=placed, history=history) as running:
        reservation = running.reservation
        assert reservation is not None
        ids = reservation.node_ids
        others = running.other_nodes()
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
            "task": ray.get(running.start_task(own_node_id), timeout=DEADLINE_S) == ids["node2"],
            "others": [node.name for node in others],
            "first": [node.name for node in first],
        }
        ray_cluster.ANSWER_TIMEOUT_S = DEADLINE_S
        asked = [*ids.values()] * 3
        answer["shards"] = shard_nodes(asked) == asked
        with tempfile.TemporaryDirectory() as folder:
            write_byte_tokenizer(Path(folder))
            (scorer,) = running.start_text_processes(
                TokenizerSource(directory=folder), RewardConfig(), ["node9"]
            ).scorers
            answer["scorer"] = score(scorer) == ids["node9"]
            holder = start_probe(running, "node9")
            tokens = holder.tokens.remote()
            ray.wait([tokens], fetch_local=False)
            answer |= after_a_loss(running, cluster, node9)
            answer["scorer afterwards"] = score(scorer) in {ids["node2"], running.reservation.node_ids["node1"]}
            answer["lost tokens"] = failure(scorer, tokens)
    cluster.shutdown()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
