"""Placement on several nodes: who is on which device, by properties and by small examples."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.config import HistoryConfig
from history.types import HistoryPlaces
from launcher.cluster.node import NodeResources
from launcher.cluster.node_assignment import near_together
from launcher.cluster.placement import Placement, plan, plan_evaluation, plan_sft
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from rollout.config import RewardConfig
from tests.launcher.cluster.test_placement import run_config

AHEAD = {"overlap": 1, "max_staleness": 1}


def gpu_nodes(*sizes: int) -> list[NodeResources]:
    return [
        NodeResources(name=f"n{number}", cpu_cores=64, available_bytes=1 << 40, gpu_bytes=(80 << 30,) * size)
        for number, size in enumerate(sizes)
    ]


def cpu_nodes(*sizes: int) -> list[NodeResources]:
    return [
        NodeResources(name=f"n{number}", cpu_cores=size, available_bytes=1 << 40, gpu_bytes=())
        for number, size in enumerate(sizes)
    ]


def config_of(
    mode: str = "colocated",
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    engines: int = 1,
    engine_tp: int = 1,
    **parts: object,
) -> RunConfig:
    return run_config(
        placement={"mode": mode},
        trainer={"parallel": {"tensor": tp, "pipeline": pp, "data": dp, "expert": ep}},
        engine={"num_engines": engines, "tensor_parallel": engine_tp},
        planner=AHEAD if mode == "disaggregated" else {},
        **parts,
    )


CONFIGS = st.builds(
    config_of,
    st.sampled_from(["colocated", "disaggregated"]),
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    engines=st.integers(1, 6),
    engine_tp=st.sampled_from([1, 2, 3, 4]),
)


def places(placement: Placement) -> list[tuple[str, int]]:
    """Node and device of each trainer rank."""
    return [(slot.node, device) for slot in placement.trainers for device in slot.devices]


def shape(placement: Placement) -> list[tuple[int, int]]:
    """Trainer ranks and engines on each node, by the order of the nodes."""
    trainers = Counter(slot.node for slot in placement.trainers)
    engines = Counter(slot.node for slot in placement.engines)
    return [(trainers[node], engines[node]) for node in placement.nodes]


def placed(config: RunConfig, nodes: list[NodeResources]) -> Placement | None:
    """The placement; None if the run is refused, which a run that fits by a simple bound is not."""
    sizes = [len(node.gpu_bytes) for node in nodes]
    parallel, engine = config.trainer.parallel, config.engine
    rooms = sum(size // parallel.tensor for size in sizes)
    apart = config.placement.mode == "disaggregated"
    try:
        return plan(config, nodes)
    except ConfigError:
        fits = rooms >= parallel.pipeline * parallel.data and max(sizes) >= engine.tensor_parallel and not apart
        assert not fits
        return None


@given(CONFIGS, st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=6))
def test_ranks_have_devices_of_their_own_and_groups_stay_inside_a_node(config: RunConfig, sizes: list[int]) -> None:
    placement = placed(config, gpu_nodes(*sizes))
    if placement is None:
        return
    size = {f"n{number}": devices for number, devices in enumerate(sizes)}
    parallel = config.trainer.parallel
    assert [slot.rank for slot in placement.trainers] == list(range(parallel.world_size))
    assert [slot.engine_id for slot in placement.engines] == list(range(config.engine.num_engines))
    assert len(set(places(placement))) == len(places(placement)) == parallel.world_size
    groups: dict[tuple[int, int], set[str]] = {}
    for slot in placement.trainers:
        groups.setdefault((slot.data_rank, slot.pipeline_rank), set()).add(slot.node)
    assert all(len(nodes) == 1 for nodes in groups.values())
    load = Counter[tuple[str, int]]()
    for slot in placement.trainers:
        load[slot.node, slot.devices[0]] += round(1000 * slot.num_gpus)
    for slot in placement.engines:
        assert len(set(slot.devices)) == slot.num_ranks == config.engine.tensor_parallel
        load.update({(slot.node, device): round(1000 * slot.num_gpus) for device in slot.devices})
    assert all(0 <= device < size[node] for node, device in load)
    assert max(load.values()) <= 1000


@given(CONFIGS, st.integers(1, 8), st.integers(1, 5))
def test_engines_use_the_devices_of_trainer_ranks_when_all_fit_there(
    config: RunConfig, devices: int, num_nodes: int
) -> None:
    placement = placed(config, gpu_nodes(*[devices] * num_nodes))
    if placement is None:
        return
    trainers = Counter(node for node, _ in places(placement))
    engine = config.engine
    on = {(slot.node, device) for slot in placement.engines for device in slot.devices}
    if config.placement.mode == "disaggregated":
        assert not on & set(places(placement))
    elif sum(ranks // engine.tensor_parallel for ranks in trainers.values()) >= engine.num_engines:
        assert on <= set(places(placement))
        assert placement.transport == "cuda_ipc"
        assert all(
            (placement.trainers[home].node, *placement.trainers[home].devices) == (slot.node, device)
            for slot, ranks in zip(placement.engines, placement.homes, strict=True)
            for device, home in zip(slot.devices, ranks, strict=True)
        )


@given(CONFIGS, st.integers(1, 8), st.integers(1, 5), st.booleans())
def test_equal_nodes_in_another_order_get_equal_shares(
    config: RunConfig, size: int, num_nodes: int, on_devices: bool
) -> None:
    nodes = (gpu_nodes if on_devices else cpu_nodes)(*[size] * num_nodes)
    first, second = placed(config, nodes), placed(config, nodes[::-1])
    assert (first and shape(first)) == (second and shape(second))


@given(CONFIGS, st.integers(1, 6))
def test_without_devices_every_tensor_group_and_engine_has_one_node(config: RunConfig, num_nodes: int) -> None:
    placement = plan(config, cpu_nodes(*[4] * num_nodes))
    nodes: dict[tuple[int, int], set[str]] = {}
    for slot in placement.trainers:
        nodes.setdefault((slot.data_rank, slot.pipeline_rank), set()).add(slot.node)
    assert all(len(names) == 1 for names in nodes.values())
    assert all(slot.devices == () for slot in (*placement.trainers, *placement.engines))
    trainers = [ranks for ranks, _ in shape(placement)]
    if config.placement.mode == "colocated":
        assert max(trainers) - min(trainers) <= config.trainer.parallel.tensor
    elif num_nodes > 1:
        assert not any(ranks and engines for ranks, engines in shape(placement))


def test_pipeline_stages_of_a_replica_are_together_and_replicas_on_other_nodes() -> None:
    placement = plan(config_of(tp=4, pp=2, dp=2, engines=4, engine_tp=4), gpu_nodes(8, 8))
    by_node = {
        node: sorted({(slot.data_rank, slot.pipeline_rank) for slot in placement.trainers if slot.node == node})
        for node in placement.nodes
    }
    assert by_node == {"n0": [(0, 0), (0, 1)], "n1": [(1, 0), (1, 1)]}
    assert [(slot.node, slot.devices) for slot in placement.engines] == [
        ("n0", (0, 1, 2, 3)),
        ("n0", (4, 5, 6, 7)),
        ("n1", (0, 1, 2, 3)),
        ("n1", (4, 5, 6, 7)),
    ]
    assert placement.transport == "cuda_ipc"


def test_ranks_of_an_expert_group_are_on_one_node_before_pipeline_stages_are() -> None:
    placement = plan(config_of(tp=2, pp=2, dp=4, ep=4, engines=2, engine_tp=8), gpu_nodes(8, 8))
    stages = {node: {slot.pipeline_rank for slot in placement.trainers if slot.node == node} for node in ("n0", "n1")}
    assert stages == {"n0": {0}, "n1": {1}}


def test_two_test_nodes_hold_a_replica_and_an_engine_each() -> None:
    placement = plan(config_of(tp=2, dp=2, engines=2), cpu_nodes(2, 2))
    assert shape(placement) == [(2, 1), (2, 1)]
    assert [slot.data_rank for slot in placement.trainers if slot.node == "n1"] == [1, 1]
    assert (placement.transport, placement.spans_nodes) == ("shm", True)
    assert placement.homes == ((0,), (2,))
    assert placement.lines()[:4] == [
        "n0:",
        "  trainer 0: tp 0 pp 0 dp 0, 1 CPU thread(s)",
        "  trainer 1: tp 1 pp 0 dp 0, 1 CPU thread(s)",
        "  engine 0: 1 rank(s), each 1 CPU core(s)",
    ]
    assert "controller on n0, scorers: 1 process(es) on n0" in placement.lines()


def test_disaggregated_sides_have_whole_nodes_in_the_ratio_of_their_cores() -> None:
    three = plan(config_of("disaggregated", tp=2, dp=2, engines=4), cpu_nodes(2, 2, 2))
    assert shape(three) == [(4, 0), (0, 2), (0, 2)]
    assert three.transport == "gloo"
    assert "n0: trainer and engines 4 threads on 2 cores: expect waiting" in three.notes
    devices = plan(config_of("disaggregated", tp=4, dp=3, engines=4, engine_tp=4), gpu_nodes(8, 8, 8, 8))
    assert shape(devices) == [(8, 0), (4, 0), (0, 2), (0, 2)]
    assert devices.transport == "nccl"
    full = plan(config_of("disaggregated", tp=4, dp=3, engines=5, engine_tp=4), gpu_nodes(8, 8, 8, 8))
    assert shape(full) == [(8, 0), (4, 1), (0, 2), (0, 2)]
    assert [slot.devices for slot in full.engines if slot.node == "n1"] == [(4, 5, 6, 7)]


def test_nodes_of_a_rack_and_of_a_block_are_adjacent() -> None:
    labels = [("b1", "r1"), ("b2", "r3"), ("b1", "r2"), ("b2", "r3"), ("b1", "r1")]
    nodes = [replace(node, block=b, rack=r) for node, (b, r) in zip(gpu_nodes(*[8] * 5), labels, strict=True)]
    assert [node.name for node in near_together(nodes)] == ["n0", "n4", "n2", "n1", "n3"]
    placement = plan(config_of(tp=8, dp=2, engines=2, engine_tp=8), nodes)
    assert {slot.node for slot in placement.trainers} == {"n0", "n4"}
    assert placement.nodes[0] == "n0"


def test_scorers_take_the_nodes_in_turn_and_each_reserves_a_logical_cpu() -> None:
    config = config_of(dp=2, engines=2)
    placement = plan(config.model_copy(update={"reward": RewardConfig(num_scorers=3)}), gpu_nodes(1, 1, 1))
    assert placement.scorers == ("n0", "n1", "n0")
    # controller's node: rank, engine, text actor and two scorers
    assert placement.num_actors_on == {"n0": 5, "n1": 3} and placement.num_actors == 8
    assert "controller on n0, scorers: 3 process(es) on n0, n1" in placement.lines()


def test_history_shards_take_the_nodes_in_turn_and_engines_have_a_reader_beside_them() -> None:
    placement = plan(config_of(dp=2, engines=2, history={"num_shards": 3}), gpu_nodes(1, 1, 1))
    assert placement.nodes == ("n0", "n1")
    assert placement.history == HistoryPlaces(shards=("n0", "n1", "n0"), readers=("n0", "n1"))
    assert "history: 3 shard(s) and 2 readers" in placement.lines()
    assert placement.notes == ("n2: no trainer rank and no engine; raise trainer.parallel.data or engine.num_engines",)


def test_each_node_that_the_run_uses_has_a_history_shard_by_default() -> None:
    placement = plan(config_of(dp=2, engines=2), gpu_nodes(1, 1, 1))
    assert placement.history.shards == ("n0", "n1")


@pytest.mark.parametrize(("num_shards", "num_nodes", "expected"), [(0, 1, 1), (0, 5, 5), (0, 64, 16), (3, 64, 3)])
def test_the_number_of_history_shards_follows_the_nodes_up_to_a_bound(num_shards, num_nodes, expected) -> None:
    assert HistoryConfig(num_shards=num_shards).shards_over(num_nodes) == expected


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (config_of(tp=16), (8, 8), r"`trainer.parallel.tensor` = 16 devices inside one node: 2 nodes of 8 devices"),
        (config_of(tp=3, dp=5), (8, 8), r"room for 4 such groups, but pipeline 1 x data 5 = 5 are needed"),
        (config_of(tp=8, dp=3), (8, 8), r"needs 24 devices .* but the 2 nodes have 16"),
        (config_of(engine_tp=12), (8, 8), r"`engine.tensor_parallel` = 12, but a node has at most 8 devices"),
        (
            config_of("disaggregated", tp=8, dp=2),
            (8, 8),
            r"1 engine rank\(s\) that share none, but the 2 nodes have 16",
        ),
        (
            config_of("disaggregated", tp=6, engine_tp=4),
            (8, 2),
            r"leaves too few devices inside single nodes for 1 eng",
        ),
        (config_of(publish={"transport": "shm"}, engines=2), (1, 1), r"engine\(s\) \[1\] share their node with no tra"),
        (config_of(publish={"transport": "cuda_ipc"}, engines=2), (1, 1), r"device\(s\) 0 of n1 have no trainer rank"),
    ],
)
def test_what_no_node_can_hold_is_refused(config: RunConfig, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(config, gpu_nodes(*sizes))


def test_a_warm_start_and_an_evaluation_follow_the_same_rules() -> None:
    config = config_of(tp=2, dp=4, engines=4, engine_tp=2)
    nodes = gpu_nodes(4, 4)
    assert [(slot.node, slot.devices) for slot in plan_sft(config.trainer, nodes)] == [
        (node, (device,)) for node in ("n0", "n1") for device in range(4)
    ]
    engines = plan_evaluation(config.engine, nodes)
    assert [(slot.node, slot.devices, slot.num_gpus) for slot in engines] == [
        (node, devices, 1.0) for node in ("n0", "n1") for devices in ((0, 1), (2, 3))
    ]
    assert {slot.devices for slot in plan_evaluation(config.engine, cpu_nodes(2, 2))} == {()}
