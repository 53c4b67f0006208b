"""Starts the history of a run: the actors on their nodes, and the service that calls them."""

from collections.abc import Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from history.config import HistoryConfig
from history.store.actors import HistoryReader, HistoryShard
from history.store.service import HistoryService, Upkeep
from history.types import HistoryPlaces, folder_of_node


def start_history(
    config: HistoryConfig,
    *,
    directory: str,
    fingerprint: str,
    environment: Mapping[str, str],
    upkeep: Upkeep,
    places: HistoryPlaces | None = None,
) -> HistoryService:
    """Start shards and readers.

    Args:
        config: budget of the shards, and their number without `places`; `shm_bytes` bounds a node's segments.
        directory: name of the folders in which readers publish, without their nodes (`history.index.segments_dir`).
        fingerprint: of the tokenizer and its vocabulary; snapshots with another fingerprint are refused.
        environment: variables of the actors' processes.
        upkeep: what is done about losses.
        places: Ray's ids of the nodes of all actors, a shard for each; None: Ray chooses those of shards, every node
            has a reader.
    """
    # no logical CPUs: the actors compute in bursts while engines and trainers wait for a device
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "runtime_env": {"env_vars": dict(environment)}}
    everywhere = tuple(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])
    shard_nodes = (None,) * config.shards_over(len(everywhere)) if places is None else places.shards
    num_shards = len(shard_nodes)
    shards = [
        HistoryShard.options(**options, **_preferring(node)).remote(
            number, num_shards, config.budget_bytes // num_shards, config.kept_steps
        )
        for number, node in enumerate(shard_nodes)
    ]

    def start_reader(node: str) -> ray.actor.ActorHandle:
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        folder = folder_of_node(directory, node)
        return HistoryReader.options(**options, scheduling_strategy=on_node).remote(folder, config.shm_bytes)

    return HistoryService(
        shards,
        everywhere if places is None else places.readers,
        start_reader=start_reader,
        directory=directory,
        fingerprint=fingerprint,
        upkeep=upkeep,
    )


def _preferring(node_id: str | None) -> dict[str, object]:
    """Options for that node, and another one if it is lost, because a shard can be refilled anywhere.

    Ray (2.60) ignores a preference of actors that need no resource at all: so they need a byte of memory.
    """
    if node_id is None:
        return {}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True), "memory": 1}
