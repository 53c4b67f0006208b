"""Where processes of lost nodes go: node for node, then free devices, then nowhere."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launcher.cluster.node import NodeResources
from launcher.cluster.placement import Placement, plan
from launcher.errors import ConfigError
from launcher.recovery.nodes import loss_lines
from launcher.recovery.relocation import Relocation, relocate
from tests.launcher.cluster.test_placement_over_nodes import config_of, cpu_nodes, gpu_nodes

SPARE = replace(gpu_nodes(8)[0], name="spare")


def placed(mode: str, sizes: Sequence[int], **config: int) -> Placement:
    return plan(config_of(mode, **config), gpu_nodes(*sizes))


def after(
    before: Placement, lost: Collection[str], *unused: NodeResources, sizes: Sequence[int] = (8, 8, 8, 8)
) -> Relocation:
    return relocate(before, lost, {node.name: node for node in gpu_nodes(*sizes)}, unused)


def test_a_spare_node_takes_everything_of_a_lost_node_on_the_same_devices() -> None:
    before = placed("disaggregated", [8, 8, 8], tp=8, engines=16)
    moved = after(before, ["n2"], SPARE)
    now = moved.placement
    assert moved.replaced == {"n2": "spare"} and now.nodes == ("n0", "n1", "spare")
    assert now.trainers == before.trainers and now.retired == () and moved.unplaced_ranks == ()
    assert now.engines == tuple(replace(one, node="spare") if one.node == "n2" else one for one in before.engines)
    assert now.num_actors_on == {"n0": 10, "n1": 8, "spare": 8}


def test_colocated_ranks_and_engines_move_together_and_keep_their_homes() -> None:
    before = placed("colocated", [8, 8], tp=4, dp=4, engines=16)
    moved = after(before, ["n1"], SPARE)
    assert {rank.node for rank in moved.placement.trainers} == {"n0", "spare"}
    assert moved.placement.homes == before.homes


def test_a_node_of_the_trainer_is_replaced_before_one_of_engines() -> None:
    before = placed("disaggregated", [8, 8, 8, 8], tp=8, dp=2, engines=2, engine_tp=8)
    moved = after(before, ["n1", "n2"], SPARE)
    assert moved.replaced == {"n1": "spare"} and moved.unplaced_ranks == ()
    assert moved.placement.retired == (0,) and [one.engine_id for one in moved.placement.serving] == [1]
    assert moved.placement.nodes == ("n0", "spare", "n3")


def test_without_a_spare_the_trainer_takes_a_node_of_engines() -> None:
    before = placed("disaggregated", [8, 8, 8, 8], tp=8, dp=2, engines=2, engine_tp=8)
    moved = after(before, ["n1"])
    assert moved.replaced == {"n1": "n3"} and moved.unplaced_ranks == ()
    assert {rank.node for rank in moved.placement.trainers} == {"n0", "n3"}
    assert moved.placement.retired == (1,) and moved.placement.nodes == ("n0", "n3", "n2")
    (said,) = loss_lines(before, moved, ["n1"])
    assert said == "lost n1: n3 replaces it, whose engine(s) [1] leave; 1 of 2 serve"


def test_engines_that_leave_for_the_trainer_take_free_devices() -> None:
    before = placed("disaggregated", [8, 8, 8, 8], tp=8, dp=2, engines=3, engine_tp=4)
    assert [slot.node for slot in before.engines] == ["n2", "n2", "n3"]
    moved = after(before, ["n1"])
    assert moved.replaced == {"n1": "n3"} and moved.placement.retired == (2,)
    before = placed("disaggregated", [8, 8, 8, 8], tp=8, dp=2, engines=2, engine_tp=4)
    assert [slot.node for slot in before.engines] == ["n2", "n3"]
    now = after(before, ["n1"]).placement
    assert now.retired == () and (now.engines[1].node, now.engines[1].devices) == ("n2", (4, 5, 6, 7))


def test_without_another_node_the_trainer_has_no_place() -> None:
    before = placed("disaggregated", [8, 8, 8], tp=8, dp=2, engines=8)
    assert after(before, ["n1"]).unplaced_ranks == tuple(range(8, 16))


def test_a_smaller_node_is_no_spare() -> None:
    before = placed("disaggregated", [8, 8, 8], tp=8, engines=16)
    small = replace(SPARE, gpu_bytes=(80 << 30,) * 4)
    older = replace(SPARE, gpu_bytes=(40 << 30,) * 8)
    assert after(before, ["n2"], small, older).replaced == {}


def test_a_node_of_the_same_gpus_whose_driver_reserves_more_is_a_spare() -> None:
    before = placed("disaggregated", [8, 8, 8], tp=8, engines=16)
    reserving = replace(SPARE, gpu_bytes=tuple(size - (100 << 20) for size in SPARE.gpu_bytes))
    assert after(before, ["n2"], reserving).replaced == {"n2": SPARE.name}


def test_engines_take_free_devices_of_other_nodes_and_the_others_are_given_up() -> None:
    before = placed("disaggregated", [8, 8, 8], tp=4, engines=4, engine_tp=4)
    assert {rank.node for rank in before.trainers} == {"n0"}
    moved = after(before, ["n1"], sizes=[8, 8, 8])
    engines = moved.placement.engines
    assert (engines[0].node, engines[0].devices) == ("n0", (4, 5, 6, 7)) and moved.placement.retired == (1,)
    assert engines[2:] == before.engines[2:] and moved.placement.num_actors_on == {"n0": 7, "n2": 2}
    (said,) = loss_lines(before, moved, ["n1"])
    assert said == "lost n1: engine(s) [1] are given up; 3 of 4 serve"


def test_an_engine_that_only_moves_is_said_so() -> None:
    before = placed("disaggregated", [8, 8, 8], tp=8, engines=3, engine_tp=4)
    (said,) = loss_lines(before, after(before, ["n2"], sizes=[8, 8, 8]), ["n2"])
    assert said == "lost n2: engine(s) [2] are given up; 2 of 3 serve"
    before = placed("disaggregated", [8, 8, 8], tp=4, engines=3, engine_tp=4)
    (said,) = loss_lines(before, after(before, ["n2"], sizes=[8, 8, 8]), ["n2"])
    assert said == "lost n2: engine(s) [2] move to free devices of other nodes"


def test_weights_that_end_at_the_node_keep_engines_from_moving_into_free_devices() -> None:
    before = replace(placed("disaggregated", [8, 8, 8], tp=4, engines=4, engine_tp=4), transport="shm")
    assert after(before, ["n1"], sizes=[8, 8, 8]).placement.retired == (0, 1)


def test_on_cpus_engines_are_given_up_or_moved_to_a_spare() -> None:
    nodes = cpu_nodes(4, 4, 4)
    before = plan(config_of("disaggregated", engines=2), nodes)
    known = {node.name: node for node in nodes}
    lost = before.engines[1].node
    assert relocate(before, [lost], known, []).placement.retired == (1,)
    moved = relocate(before, [lost], known, [replace(nodes[0], name="spare")])
    assert moved.placement.engines[1].node == "spare" and moved.placement.transport == "gloo"


@given(
    st.sampled_from(["colocated", "disaggregated"]),
    st.integers(1, 2),
    st.integers(1, 12),
    st.sets(st.integers(1, 3), min_size=1),
    st.integers(0, 3),
)
def test_no_process_stays_on_a_lost_node_and_no_device_is_used_twice(
    mode: str, data: int, engines: int, numbers: set[int], num_spares: int
) -> None:
    try:
        before = placed(mode, [8, 8, 8, 8], tp=4, dp=data, engines=engines, engine_tp=2)
    except ConfigError:
        assume(False)
    lost = {f"n{number}" for number in numbers} & set(before.nodes)
    moved = after(before, lost, *(replace(SPARE, name=f"spare{number}") for number in range(num_spares)))
    now = moved.placement
    assert not lost & {slot.node for slot in now.serving}
    assert {rank.rank for rank in now.trainers if rank.node in lost} == set(moved.unplaced_ranks)
    assert not lost & set(now.nodes) and now.nodes[0] == before.nodes[0]
    if mode == "disaggregated":
        used = [(one.node, device) for one in (*now.trainers, *now.serving) for device in one.devices]
        assert len(used) == len(set(used))
    if now.transport == "cuda_ipc":
        assert all(now.homes[slot.engine_id] for slot in now.serving)


@pytest.mark.parametrize(
    ("unused", "line"),
    [
        ([SPARE], "lost n2: spare replaces it"),
        ([], "lost n2: engine(s) [8, 9, 10, 11, 12, 13, 14, 15] are given up; 8 of 16 serve"),
    ],
    ids=["spare", "none"],
)
def test_a_line_says_what_becomes_of_a_node(unused: list[NodeResources], line: str) -> None:
    before = placed("disaggregated", [8, 8, 8], tp=8, engines=16)
    moved = after(before, ["n2"], *unused)
    (said,) = loss_lines(before, moved, ["n2"])
    assert said == line


def test_a_line_names_ranks_without_a_node() -> None:
    before = placed("disaggregated", [8, 8, 8], tp=8, dp=2, engines=8)
    (said,) = loss_lines(before, after(before, ["n1"]), ["n1"])
    assert said == "lost n1: no node replaces it, and trainer rank(s) [8, 9, 10, 11, 12, 13, 14, 15] need one"
