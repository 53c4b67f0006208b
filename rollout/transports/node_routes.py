"""The way of a bucket between trainer ranks: it enters each node once and is passed on inside the node. Pure: no torch.

A source rank sends directly to the receivers on its own node, and to one receiver on every other node. That receiver
passes the bucket on to the others of its node. It differs from bucket to bucket, so the ranks of a node share the work.

Invariants: every receiver gets the bucket once; a bucket crosses the border of a node at most once.
"""

from collections.abc import Sequence

from rollout.weights.manifest import Bucket


def shared_buckets(buckets: Sequence[Bucket], engine_ranks: Sequence[int]) -> list[Bucket]:
    """Buckets that any of these engine ranks requires, in index order."""
    return [bucket for bucket in buckets if any(bucket.required_by(rank) for rank in engine_ranks)]


def givers(bucket: Bucket, hosted: Sequence[Sequence[int]], nodes: Sequence[str]) -> dict[int, int]:
    """By trainer rank that receives a bucket, the rank that it receives the bucket from.

    Args:
        bucket: the bucket.
        hosted: by trainer rank, the engine ranks on its device.
        nodes: node of each trainer rank.
    """
    source = bucket.source_rank
    by_node: dict[str, list[int]] = {}
    for rank, engine_ranks in enumerate(hosted):
        if rank != source and shared_buckets([bucket], engine_ranks):
            by_node.setdefault(nodes[rank], []).append(rank)
    givers: dict[int, int] = {}
    for node, ranks in by_node.items():
        entry = ranks[bucket.index % len(ranks)]
        givers |= {rank: source if node == nodes[source] or rank == entry else entry for rank in ranks}
    return givers


def crossing_bytes(buckets: Sequence[Bucket], hosted: Sequence[Sequence[int]], nodes: Sequence[str]) -> int:
    """Bytes of a publish that are sent from one node to another."""
    return sum(
        bucket.num_bytes
        for bucket in buckets
        for receiver, giver in givers(bucket, hosted, nodes).items()
        if nodes[receiver] != nodes[giver]
    )
