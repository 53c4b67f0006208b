"""A run on three nodes with stand-ins for Ray: which nodes are asked, what is reserved, which engines start where."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from launcher.cluster.placement import Placement, plan
from launcher.recovery import nodes as lost_nodes
from launcher.recovery.engines import LostEngines
from launcher.recovery.nodes import LostNodes
from launcher.recovery.restart_limit import RestartLimit
from rollout.config import EngineConfig
from rollout.failures import EnginesLostError, ProcessLostError
from rollout.pool.engine_group import EngineGroup
from tests.launcher.cluster.test_placement_over_nodes import config_of, gpu_nodes

NODES = gpu_nodes(8, 8, 8)
SPARE = replace(NODES[0], name="spare")


class Running:
    """`Processes` of a run on `NODES`."""

    def __init__(self, *, unused=()) -> None:
        self.nodes = tuple(NODES)
        self.gone: list[str] = []
        self.silent: list[str] = []
        self.unused = unused
        self.said: list[str] = []
        self.used: list[tuple[str, ...]] = []
        self.ended: list[object] = []
        self.begun: list[tuple[int, str, tuple[int, ...]]] = []

    def gone_nodes(self, suspects=()):
        silent = [name for name in self.silent if name in suspects]
        return [node.name for node in self.nodes if node.name in (*self.gone, *silent)]

    def other_nodes(self):
        return self.unused

    def use_nodes(self, nodes, placed, history):
        self.nodes = tuple(nodes)
        self.used.append(tuple(node.name for node in nodes))
        assert set(placed) == set(self.used[-1])

    def end(self, actors):
        self.ended += actors

    def begin_engines(self, specs, slots):
        (slot,) = slots
        self.begun.append((slot.engine_id, slot.node, slot.devices))
        return EngineGroup([f"new {slot.engine_id}"], num_ranks=1), None


@pytest.fixture(autouse=True)
def start_limits_s(monkeypatch):
    limits: list[float] = []
    monkeypatch.setattr(EngineGroup, "finish_start", lambda self, call, *, timeout_s: limits.append(timeout_s))
    monkeypatch.setattr(EngineGroup, "check_alive", lambda self, *, timeout_s: None)
    return limits


def run_on(running: Running, *, engines: int = 16, tp: int = 8, dp: int = 1, **more: int) -> LostEngines:
    placement = plan(config_of("disaggregated", tp=tp, dp=dp, engines=engines, **more), NODES)
    group = EngineGroup([f"old {number}" for number in range(engines)], num_ranks=1)
    nodes = LostNodes(running=running, placement=placement, say=running.said.append)
    return LostEngines(
        running=running,
        engines=group,
        specs=[SimpleNamespace(engine_id=number, config=EngineConfig(start_timeout_s=77)) for number in range(engines)],
        nodes=nodes,
        limit=RestartLimit(max_restarts=1, newest_step=lambda: 0),
        say=running.said.append,
        check_model=lambda number, group: None,
    )


def lose(engines: LostEngines, *numbers: int) -> None:
    for number in numbers:
        engines.engines.mark_lost(number, "its process ended")


def test_a_dead_engine_on_a_living_node_starts_there_again_and_counts(start_limits_s: list[float]) -> None:
    running = Running()
    engines = run_on(running)
    lose(engines, 3)
    engines.start_again(None)
    assert running.begun == [(3, "n1", (3,))] and engines.limit.num_restarts == 1 and start_limits_s == [77]
    assert (running.ended, running.used, engines.nodes.num_lost) == (["old 3"], [], 0)
    lose(engines, 3)
    with pytest.raises(EnginesLostError, match=r"engines have died 2 times"):
        engines.start_again(None)


def test_engines_of_a_lost_node_start_on_a_spare_one_and_do_not_count() -> None:
    running = Running(unused=(SPARE,))
    engines = run_on(running)
    running.gone = ["n2"]
    lose(engines, *range(8, 16))
    engines.start_again(None)
    assert running.begun == [(number, "spare", (number - 8,)) for number in range(8, 16)]
    assert running.used == [("n0", "n1", "spare")] and engines.limit.num_restarts == 0
    assert engines.engines.retired == () and engines.engines.alive == tuple(range(16))
    assert running.said == ["lost n2: spare replaces it"]
    lose(engines, 8)  # a second death of the engine is its own
    engines.start_again(None)
    assert engines.limit.num_restarts == 1 and running.begun[-1] == (8, "spare", (0,))


def test_a_node_that_is_cut_off_is_found_by_its_silence() -> None:
    running = Running()
    engines = run_on(running)
    running.silent = ["n2"]
    lose(engines, *range(8, 16))
    engines.start_again(None)
    assert engines.engines.retired == tuple(range(8, 16)) and engines.engines.alive == tuple(range(8))
    assert engines.find(hung=False) == () and running.begun == []
    assert len(running.ended) == 8 and running.used == [("n0", "n1")]
    assert "8 of 16 serve" in running.said[0]


def test_the_controllers_own_node_is_never_lost() -> None:
    running = Running()
    engines = run_on(running, engines=3, tp=4, engine_tp=4)
    running.silent = ["n0"]
    engines.nodes.follow(suspects=["n0", "n1"])
    assert engines.nodes.num_lost == 0 and running.said == []


def test_a_run_without_an_engine_left_ends() -> None:
    running = Running()
    engines = run_on(running)
    running.gone = ["n1", "n2"]
    lose(engines, *range(16))
    with pytest.raises(ProcessLostError, match="no engine is left"):
        engines.start_again(None)


def test_engines_leave_a_node_that_the_trainer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    engines = run_on(running, engines=2, tp=4, dp=2, engine_tp=8)
    assert {rank.node for rank in engines.nodes.placement.trainers} == {"n0"}
    engines.nodes.placement = spread_out(engines.nodes.placement)
    engines.__post_init__()
    running.gone = ["n1"]
    engines.nodes.follow()
    assert engines.find(hung=False) == (1,)
    assert "its place on n2 is taken" in engines.engines.loss_reason(1)
    engines.start_again(None)
    assert engines.engines.retired == (1,) and running.ended == ["old 1"] and running.begun == []


def spread_out(placement: Placement) -> Placement:
    """Four ranks on n0 and four on n1; engine 0 on n0's other devices, engine 1 alone on n2."""
    trainers = tuple(
        replace(rank, node="n1", devices=(rank.rank - 4,)) if rank.rank >= 4 else rank for rank in placement.trainers
    )
    first, second = placement.engines
    engines = (replace(first, node="n0", devices=(4, 5, 6, 7)), replace(second, node="n2"))
    return replace(placement, trainers=trainers, engines=engines, nodes=("n0", "n1", "n2"))


def test_a_trainer_without_a_place_keeps_the_placement_and_says_why() -> None:
    running = Running()
    engines = run_on(running, engines=8, tp=8, dp=2)
    before = engines.nodes.placement
    running.gone = ["n1"]
    engines.nodes.follow()
    assert engines.nodes.unplaced == "no node replaces that of trainer rank(s) [8, 9, 10, 11, 12, 13, 14, 15]"
    assert engines.nodes.placement is before and running.used == []


def test_engines_of_a_node_that_the_trainer_needs_are_not_started_there_again() -> None:
    running = Running()
    engines = run_on(running, engines=8, tp=8, dp=2)
    running.gone = ["n1", "n2"]
    lose(engines, *range(8))
    for _ in range(2):
        with pytest.raises(ProcessLostError, match="no node replaces that of trainer") as lost:
            engines.start_again(None)
        assert lost.value.place.role == "trainer"
    assert running.begun == [] and engines.nodes.num_lost == 2 and len(running.said) == 2


def test_a_rollout_is_left_when_the_trainers_node_is_gone_and_nodes_are_asked_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running()
    nodes = run_on(running, engines=8, tp=8, dp=2).nodes
    now = 1000.0
    monkeypatch.setattr(lost_nodes.time, "monotonic", lambda: now)
    nodes.check_trainer()
    running.gone = ["n1", "n2"]
    nodes.check_trainer()
    now += lost_nodes.LOOK_EVERY_S
    with pytest.raises(ProcessLostError, match="n1, n2 left") as lost:
        nodes.check_trainer()
    assert lost.value.place.ranks == tuple(range(8, 16))
