"""Calls on engines: answers and errors carry their engine's number even when other engines are lost."""

from typing import ClassVar

import pytest
import ray

from rollout.engine.state import EngineState, EngineStatus
from rollout.failures import CallError, DeadlineError, ProcessLostError
from rollout.pool import engine_group
from rollout.pool.engine_group import EngineGroup
from rollout.types import WeightVersion


class Method:
    def __init__(self, answer):
        self.answer = answer

    def remote(self, *args):
        return Ref(self.answer(*args) if callable(self.answer) else self.answer)


class Ref:
    """The answer of a call, or the error that it ended with; `LATE` has not come."""

    def __init__(self, value):
        self.value = value


LATE = object()


class Ray:
    """`ray` as `rollout.pool.engine_group` uses it."""

    exceptions = ray.exceptions
    killed: ClassVar[list] = []

    @staticmethod
    def wait(refs, *, num_returns, timeout, fetch_local=True):
        # in another order than asked for, as Ray may
        return [ref for ref in reversed(refs) if ref.value is not LATE], [ref for ref in refs if ref.value is LATE]

    @classmethod
    def kill(cls, actor, *, no_restart):
        cls.killed.append(actor)

    @staticmethod
    def get(ref):
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value


class Engine:
    def __init__(self, **answers):
        self.__dict__.update({name: Method(answer) for name, answer in answers.items()})


@pytest.fixture(autouse=True)
def _ray(monkeypatch):
    monkeypatch.setattr(engine_group, "ray", Ray)


def failed(message):
    return ray.exceptions.RayTaskError("fence", "traceback", RuntimeError(message))


def group(num_engines, failing, **answers):
    """Engines; those in `failing` give other answers."""
    return EngineGroup([Engine(**{**answers, **failing.get(n, {})}) for n in range(num_engines)], num_ranks=1)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_a_fence_of_engine_3_that_fails_is_reported_as_engine_3(lost):
    engines = group(4, {3: {"fence": failed("no answer")}}, fence=None)
    if lost is not None:
        engines.mark_lost(lost, "killed")
    with pytest.raises(CallError, match=r"^engine 3: fence failed: RuntimeError: no answer") as error:
        engines.fence({3: "the probe differs"}, timeout_s=1)
    assert error.value.place.ranks == (3,)


def test_a_dead_engine_and_a_late_engine_are_named_by_number_after_another_was_lost():
    died = ray.exceptions.RayActorError()
    engines = group(4, {2: {"drain": died}, 3: {"drain": LATE}}, drain=None)
    engines.mark_lost(0, "killed")
    with pytest.raises(ProcessLostError, match=r"^engine 2: drain failed") as ended:
        engines.drain(timeout_s=1)
    engines.mark_lost(2, "killed")
    with pytest.raises(DeadlineError, match=r"^engine\(s\) \[3\] had not finished `drain` after 1 s") as late:
        engines.drain(timeout_s=1)
    assert (ended.value.place.ranks, late.value.place.ranks) == ((2,), (3,))


def test_answers_are_keyed_by_engine_number_and_a_wrong_type_is_an_error():
    engines = group(3, {}, node_id="here")
    engines.mark_lost(1, "killed")
    assert engines.node_ids(timeout_s=1) == {0: "here", 2: "here"}
    assert list(engines.node_ids(timeout_s=1)) == [0, 2]
    wrong = group(2, {1: {"node_id": 5}}, node_id="here")
    with pytest.raises(CallError, match=r"^engine 1: node_id answered with int, not str"):
        wrong.node_ids(timeout_s=1)


def test_each_engine_gets_its_own_arguments():
    said = []
    engines = group(3, {}, fence=lambda fault: said.append(fault))
    engines.fence({2: "two", 0: "zero"}, timeout_s=1)
    assert said == ["two", "zero"]


def test_a_call_to_living_engines_ignores_a_dead_engine():
    died = ray.exceptions.RayActorError()
    engines = group(2, {0: {"pause_sampling": died, "fault": died}}, pause_sampling=None, fault="")
    engines.pause_sampling(timeout_s=1)
    assert engines.lost == (0,)


def test_a_retired_engine_is_lost_and_never_called():
    engines = group(3, {}, node_id="here")
    engines.retire(1, "its node is gone")
    assert (engines.retired, engines.lost, engines.alive) == ((1,), (1,), (0, 2))
    assert engines.node_ids(timeout_s=1) == {0: "here", 2: "here"} and engines.loss_reason(1) == "its node is gone"


def test_a_call_to_living_engines_ends_an_engine_that_does_not_answer():
    engines = group(3, {1: {"resume_sampling": LATE}}, resume_sampling=None)
    engines.resume_sampling(timeout_s=1)
    assert engines.lost == (1,) and engines.num_hung == 1
    assert engines.loss_reason(1).startswith("engine 1 had not finished `resume_sampling` after 1 s and was ended")
    assert engines.actors[1] in Ray.killed


def test_figures_come_from_the_engines_that_live():
    """The process of engine 0 has died, vLLM's process in engine 1, and engine 2 hangs."""
    died = ray.exceptions.RayActorError()
    core_died = {"lost_history_calls": failed("EngineDeadError"), "fault": "vLLM's process has ended"}
    others = {0: {"lost_history_calls": died}, 1: core_died, 2: {"lost_history_calls": LATE}}
    engines = group(4, others, lost_history_calls=7, fault="")
    assert engines.lost_history_calls(timeout_s=1) == {3: 7}
    assert engines.lost == (0, 1, 2) and engines.num_hung == 1
    assert "RayActorError" in engines.loss_reason(0) and engines.loss_reason(1) == "vLLM's process has ended"
    with pytest.raises(CallError, match="engine 0: lost_history_calls failed"):
        group(1, {}, lost_history_calls=failed("a defect"), fault="").lost_history_calls(timeout_s=1)


def test_engines_that_require_other_parts_of_the_weights_are_named():
    engines = group(3, {2: {"required": [{"a": ()}]}}, required=[{"b": ()}])
    with pytest.raises(RuntimeError, match="engine 2 takes other parts of the weights than engine 0"):
        engines.required(timeout_s=1)


def test_engine_states_have_their_type():
    state = EngineState(status=EngineStatus.SERVING, weight_version=WeightVersion(1), held=False, fault="")
    assert group(1, {}, state=state).states(timeout_s=1) == {0: state}
