"""The way of buckets between trainer ranks on several nodes."""

from hypothesis import given
from hypothesis import strategies as st

from rollout.transports.node_routes import crossing_bytes, givers
from rollout.weights.manifest import Bucket

RANKS = st.integers(1, 3).flatmap(
    lambda num_engine_ranks: st.lists(
        st.tuples(st.sampled_from("abcd"), st.sets(st.integers(0, num_engine_ranks - 1)).map(sorted)),
        min_size=1,
        max_size=10,
    )
)


def bucket(index: int, source: int, engine_ranks: tuple[int, ...] = (), num_bytes: int = 100) -> Bucket:
    return Bucket(index=index, source_rank=source, num_bytes=num_bytes, pieces=(), engine_ranks=engine_ranks)


@given(RANKS, st.integers(0, 20), st.data())
def test_every_receiver_gets_a_bucket_once_and_a_bucket_enters_each_node_once(
    ranks: list[tuple[str, list[int]]], index: int, data: st.DataObject
) -> None:
    nodes, hosted = [node for node, _ in ranks], [engine_ranks for _, engine_ranks in ranks]
    source = data.draw(st.integers(0, len(ranks) - 1))
    sent = bucket(index, source, data.draw(st.sampled_from([(), (0,), (0, 1)])))
    route = givers(sent, hosted, nodes)
    needs = {
        rank
        for rank, engine_ranks in enumerate(hosted)
        if rank != source and any(sent.required_by(engine_rank) for engine_rank in engine_ranks)
    }
    assert set(route) == needs
    for receiver in route:  # the chain of givers ends at the source
        seen = [receiver]
        while seen[-1] != source:
            seen.append(route[seen[-1]])
        assert len(seen) <= 3
    entered = [nodes[receiver] for receiver, giver in route.items() if nodes[receiver] != nodes[giver]]
    assert sorted(entered) == sorted({nodes[rank] for rank in needs} - {nodes[source]})


def test_replicas_on_every_node_send_a_share_of_the_shard_to_each_other_node() -> None:
    num_nodes, per_node, shard = 4, 8, 800
    nodes = [f"n{number}" for number in range(num_nodes) for _ in range(per_node)]
    hosted = [[rank % 4] for rank in range(num_nodes * per_node)]  # two engines of four ranks on each node
    buckets = [bucket(index, source, (index % 4,), shard // 8) for index, source in enumerate(range(0, 32))]
    total = sum(one.num_bytes for one in buckets)
    assert crossing_bytes(buckets, hosted, nodes) == (num_nodes - 1) * total
    assert crossing_bytes(buckets, hosted, ["n0"] * len(nodes)) == 0


def test_the_rank_that_passes_a_bucket_on_differs_from_bucket_to_bucket() -> None:
    nodes, hosted = ["a", "b", "b", "b"], [[0], [0], [0], [0]]
    entries = [
        [receiver for receiver, giver in givers(bucket(index, 0), hosted, nodes).items() if giver == 0]
        for index in range(6)
    ]
    assert entries == [[1], [2], [3], [1], [2], [3]]
