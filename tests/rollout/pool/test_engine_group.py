"""Calls on engines: answers and errors carry their engine's number even when other engines are lost."""

import re
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import ray

from history import ray_wait
from history.drafting.stats import DraftStats
from history.patience import Patience
from megatron_rl.model.engine_model import as_built
from rollout.engine.state import EngineProgress, EngineState, EngineStatus, UpdateTimes
from rollout.failures import CallError, DeadlineError, Place, ProcessLostError
from rollout.pool import engine_call, engine_group, engine_watch, living_engines
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_watch import EngineWatch
from rollout.processes import ProcessId
from rollout.tracing.forwards import FORWARD
from rollout.types import WeightVersion
from rollout.weights.announcement import HeldPlan
from rollout.weights.manifest import Bucket, WeightManifest
from tests.support.model_specs import qwen_spec


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
    stored: ClassVar[list] = []

    @classmethod
    def put(cls, value):
        cls.stored.append(value)
        return value

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
    for module in (ray_wait, engine_call, engine_group, engine_watch, living_engines):
        monkeypatch.setattr(module, "ray", Ray)
    Ray.killed, Ray.stored = [], []


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


DIED = ray.exceptions.RayActorError()
DEATHS = {
    "the actor": (lambda call: {call: DIED, "fault": DIED}, "RayActorError"),
    "vLLM's process": (
        lambda call: {call: failed("EngineDeadError"), "fault": "vLLM's process has ended"},
        "vLLM's process has ended",
    ),
    "a rank, which vLLM has not noticed": (
        lambda call: {call: failed("cancelled"), "fault": "", "ping": failed("Executor failed.")},
        "its ranks cannot be called: RuntimeError: Executor failed.",
    ),
    "nothing, but it is frozen": (lambda call: {call: LATE}, "engine 3 .*had not finished `{call}` after 1 s and was"),
}
"""What an engine answers to a call after the death of its process, and why it is lost."""


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_an_engine_that_dies_in_a_switch_is_lost_and_its_processes_have_ended_when_engines_sleep(
    call, death, monkeypatch
):
    killed = []
    monkeypatch.setattr(living_engines, "kill_on_nodes", lambda processes, *, stacks: killed.append(list(processes)))
    answers, why = DEATHS[death]
    living = {"start": on_host("gpu-00"), "sleep": None, "wake": None, "ping": None, "fault": ""}
    engines = group(5, {3: {"start": on_host("gpu-03"), **answers(call)}}, **living)
    engines.finish_start(engines.begin_start(), timeout_s=1)
    if call == "wake":
        engines.wake("weights", timeout_s=1)
        killed.clear()
    engines.sleep(timeout_s=1)
    assert engines.lost == (3,) and re.search(why.format(call=call), engines.loss_reason(3))
    assert killed[-1] == [on_host("gpu-03")]
    engines.retire(3, "its node is gone")
    engines.sleep(timeout_s=1)
    assert killed[-1] == []


@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_an_engine_that_lives_and_cannot_switch_is_an_error(call):
    living = {"sleep": None, "wake": None, "ping": None, "fault": ""}
    engines = group(3, {1: {call: failed("CUDA error: out of memory")}}, **living)
    switch = engines.sleep if call == "sleep" else partial(engines.wake, "weights")
    with pytest.raises(CallError, match=rf"^engine 1: {call} failed: .*out of memory"):
        switch(timeout_s=1)
    assert engines.lost == ()


def test_all_engines_may_die_in_a_switch():
    engines = group(2, {}, sleep=DIED, fault=DIED)
    engines.sleep(timeout_s=1)
    engines.wake("weights", timeout_s=1)
    assert engines.alive == ()
    with pytest.raises(ProcessLostError, match="no engine is left to publish to: RayActorError") as none:
        engines.required(timeout_s=1)
    assert none.value.place == Place(role="engine", ranks=(0, 1))


def test_an_engine_that_dies_in_its_first_sleep_has_not_started():
    engines = group(2, {1: {"sleep": DIED, "fault": DIED}}, start=on_host("gpu-00"), sleep=None, fault="")
    starting = engines.begin_start()
    engines.sleep(timeout_s=1)
    with pytest.raises(ProcessLostError, match="engine 1 was lost after its start: RayActorError") as lost:
        engines.finish_start(starting, timeout_s=1)
    assert lost.value.place == Place(role="engine", ranks=(1,), node="gpu-00")


def test_an_engine_that_dies_in_its_sleep_before_it_takes_a_number_is_noticed_by_the_next_call():
    """So `restart_lost` starts it once more, when it connects all engines."""
    engines = group(2, {}, node_id="n", fault="")
    engines.mark_lost(1, "killed")
    started = EngineGroup([Engine(sleep=DIED, fault=DIED, node_id=DIED)], num_ranks=1, first=1)
    started.sleep(timeout_s=1)
    started.wake("weights", timeout_s=1)
    engines.replace(1, started)
    with pytest.raises(ProcessLostError, match="engine 1: node_id failed"):
        engines.node_ids(timeout_s=1)
    engines.check_alive(timeout_s=1)
    assert engines.lost == (1,)


def test_an_engine_that_dies_in_the_last_call_of_a_publish_is_lost_and_the_others_are_not_asked_again():
    """They serve the new weights, so that a second publish of the version would be refused."""
    asked = []
    others = {1: {"resume": ray.exceptions.RayActorError()}, 2: {"resume": LATE}}
    engines = group(3, others, resume=lambda: asked.append(0))
    engines.resume(timeout_s=1)
    assert asked == [0] and engines.lost == (1, 2) and engines.num_hung == 1


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


def test_an_engine_that_answers_while_the_controller_is_stopped_is_not_late(monkeypatch):
    """The controller is stopped for an hour in its last look, and reads the answer in the next one."""
    now, looks = [0.0], []

    def wait(refs, *, num_returns, timeout, fetch_local):
        looks.append(timeout)
        now[0] += timeout + 3600.0 * (len(looks) == 2)
        return (refs, []) if len(looks) == 3 else ([], refs)

    monkeypatch.setattr(Ray, "wait", staticmethod(wait))
    monkeypatch.setattr(ray_wait, "Patience", partial(Patience, clock=lambda: now[0]))
    group(1, {}, drain=None).drain(timeout_s=8)
    assert looks == [5.0, 3.0, 5.0]


def on_host(host, pid=7):
    return ProcessId(node_id=f"id of {host}", pid=pid, start_ticks=0, host=host)


def test_engines_that_are_late_or_hang_are_named_with_their_nodes(monkeypatch):
    killed = []
    monkeypatch.setattr(
        living_engines, "kill_on_nodes", lambda processes, *, stacks: killed.append((processes, stacks))
    )
    others = {n: {"start": on_host(f"gpu-0{n}", pid=70 + n), "drain": LATE} for n in (1, 2)}
    engines = group(4, others, start=on_host("gpu-00"), drain=None)
    engines.finish_start(engines.begin_start(), timeout_s=1)
    with pytest.raises(DeadlineError, match=r"^engine\(s\) \[1, 2\] on gpu-01 and others had not finished") as late:
        engines.drain(timeout_s=1)
    assert late.value.place == Place(role="engine", ranks=(1, 2), node="gpu-01")
    engines.end_hung(2, "emitted no token for 9 s")
    assert engines.loss_reason(2) == "engine 2 (process 72 on gpu-02) emitted no token for 9 s and was ended"
    assert killed == [([on_host("gpu-02", pid=72)], True)]
    engines.replace(2, EngineGroup([Engine()], num_ranks=1, hosts=["gpu-09"]))
    assert [engines.host_of(number) for number in range(4)] == ["gpu-00", "gpu-01", "gpu-09", "gpu-00"]


def test_an_engine_that_does_not_start_is_named_with_the_node_where_it_was_to_start():
    engines = EngineGroup([Engine(start=LATE), Engine(start=LATE)], num_ranks=1, hosts=["gpu-03", "gpu-03"])
    with pytest.raises(DeadlineError, match=r"engine\(s\) \[0, 1\] on gpu-03 had not finished `start`") as late:
        engines.finish_start(engines.begin_start(), timeout_s=1)
    assert late.value.place.node == "gpu-03"
    engines.end_hung(1, "hangs")
    assert engines.loss_reason(1) == "engine 1 (on gpu-03) hangs and was ended"


def test_an_engine_that_replaces_another_has_the_number_of_the_other_in_messages():
    late = EngineGroup([Engine(start=LATE)], num_ranks=1, hosts=["gpu-03"], first=7)
    with pytest.raises(DeadlineError, match=r"engine\(s\) \[7\] on gpu-03 had not finished `start`") as error:
        late.finish_start(late.begin_start(), timeout_s=1)
    assert error.value.place.ranks == (7,)
    broken = EngineGroup([Engine(start=failed("no memory"))], num_ranks=1, first=7)
    with pytest.raises(CallError, match=r"engine 7: start failed: .*no memory") as failure:
        broken.finish_start(broken.begin_start(), timeout_s=1)
    assert failure.value.place.ranks == (7,)
    hung = EngineGroup([Engine(hold=LATE)], num_ranks=1, first=7)
    hung.hold(timeout_s=1)
    assert hung.lost == (0,) and hung.loss_reason(0).startswith("engine 7 had not finished `hold`")


def test_figures_come_from_the_engines_that_live():
    """The process of engine 0 has died, and vLLM's process in engine 1."""
    died = ray.exceptions.RayActorError()
    core_died = {"history_figures": failed("EngineDeadError"), "fault": "vLLM's process has ended"}
    engines = group(3, {0: {"history_figures": died}, 1: core_died}, history_figures=(DraftStats(), 7), fault="")
    assert engines.history_figures(timeout_s=1) == {2: (DraftStats(), 7)}
    assert engines.lost == (0, 1) and engines.num_hung == 0
    assert "RayActorError" in engines.loss_reason(0) and engines.loss_reason(1) == "vLLM's process has ended"
    with pytest.raises(CallError, match="engine 0: history_figures failed"):
        group(1, {}, history_figures=failed("a defect"), fault="").history_figures(timeout_s=1)


@pytest.mark.parametrize("method", ["history_figures", "drain_trace"])
def test_an_engine_that_is_late_with_a_figure_is_left_out_and_lives_on(method, caplog):
    """It is in a long prefill: its process tells of progress at once, its ranks answer after their forward."""
    figure = (DraftStats(), 7) if method == "history_figures" else np.zeros(0, dtype=FORWARD)
    tokens = iter((5, 9))
    progress = {"progress": lambda: EngineProgress(num_tokens=next(tokens), can_sample=True)}
    engines = group(2, {0: {method: LATE, **progress}}, **{method: figure})
    watch = EngineWatch(engines, timeout_s=600)
    for _ in range(2):
        watch._looked_at -= 2 * watch.look_every_s
        watch.look({0})
        assert list(getattr(engines, method)(timeout_s=30)) == [1]
    assert engines.alive == (0, 1) and engines.num_hung == 0 and Ray.killed == []
    assert f"engine 0 had not finished `{method}` after 30 s; its answer is left out" in caplog.text


def test_engines_that_require_other_parts_of_the_weights_are_named():
    engines = group(3, {2: {"required": [{"a": ()}]}}, required=[{"b": ()}])
    with pytest.raises(RuntimeError, match="engine 2 takes other parts of the weights than engine 0"):
        engines.required(timeout_s=1)


def test_models_are_keyed_by_engine_number_and_an_engine_that_reports_none_is_named():
    built = as_built(qwen_spec())
    assert group(2, {}, built_model=built).built_models(timeout_s=1) == {0: built, 1: built}
    with pytest.raises(CallError, match="engine 1: built_model answered with NoneType, not BuiltModel"):
        group(2, {1: {"built_model": None}}, built_model=built).built_models(timeout_s=1)


def test_engine_states_have_their_type():
    state = EngineState(status=EngineStatus.SERVING, weight_version=WeightVersion(1), held=False, fault="")
    assert group(1, {}, state=state).states(timeout_s=1) == {0: state}


UPDATED = UpdateTimes(
    arrive_s=0.0, pause_s=0.0, apply_s=0.0, num_in_flight=0, num_recomputed_tokens=0, received_bytes=0
)
BUCKETS = tuple(Bucket(index=number, source_rank=0, num_bytes=64, pieces=()) for number in range(2))


class Publishes:
    """An engine that holds a plan as the product's does, and notes what it has got."""

    def __init__(self):
        self.held = HeldPlan()
        self.wholes = []
        self.applied = []
        self.refuses = False
        self.check, self.update = Method(self._check), Method(self._update)

    def _check(self, announced, manifest=None):
        if self.refuses:
            return failed("refused")
        if manifest is not None:
            self.wholes.append(manifest)
            self.held.keep(announced, manifest)
        return self._found(announced, None)

    def _update(self, announced, segments, with_sums):
        self.applied.append(announced.weight_version)
        return self._found(announced, UPDATED)

    def _found(self, announced, answer):
        try:
            self.manifest = self.held.manifest(announced)
        except RuntimeError as error:
            return ray.exceptions.RayTaskError("check", "traceback", error)
        return answer


def manifest(version, **changes):
    """Of a publish of one plan, which shares no object with that of another publish."""
    buckets = tuple(replace(bucket) for bucket in BUCKETS)
    made = WeightManifest(run_id="r", weight_version=WeightVersion(version), format="bf16", tensors=(), buckets=buckets)
    return replace(made, **changes)


def publish(engines, version, **changes):
    """The publish, as `Publisher` and a delivery do it; every engine has the manifest of this version then."""
    made = manifest(version, **changes)
    engines.check(made, timeout_s=1)
    engines.wait(engines.begin_update(made, {number: {} for number in engines.alive}), timeout_s=1)
    assert all(engines.actors[number].manifest == made for number in engines.alive)
    assert all(engines.actors[number].applied[-1] == version for number in engines.alive)


def test_the_manifest_travels_once_and_then_its_version():
    actors = [Publishes(), Publishes()]
    engines = EngineGroup(actors, num_ranks=1)
    for version in range(3):
        publish(engines, version)
    assert Ray.stored == [manifest(0)]
    assert [actor.wholes for actor in actors] == [[manifest(0)], [manifest(0)]]


def test_an_engine_that_took_the_number_of_a_lost_one_gets_the_whole_manifest_and_the_others_do_not():
    actors = [Publishes(), Publishes()]
    engines = EngineGroup(actors, num_ranks=1)
    publish(engines, 0)
    engines.mark_lost(1, "killed")
    publish(engines, 1)
    restarted = Publishes()
    engines.replace(1, EngineGroup([restarted], num_ranks=1))
    publish(engines, 2)
    publish(engines, 3)
    assert (actors[0].wholes, restarted.wholes) == ([manifest(0)], [manifest(2)])


@pytest.mark.parametrize("change", [{"format": "int8"}, {"run_id": "other"}, {"buckets": BUCKETS[:1]}])
def test_another_plan_travels_whole_to_every_engine(change):
    actors = [Publishes(), Publishes()]
    engines = EngineGroup(actors, num_ranks=1)
    publish(engines, 0)
    publish(engines, 1, **change)
    publish(engines, 2)
    assert [actor.wholes for actor in actors] == [[manifest(0), manifest(1, **change), manifest(2)]] * 2


def test_an_engine_refuses_a_publish_of_a_plan_that_it_was_not_checked_against():
    engines = EngineGroup([Publishes()], num_ranks=1)
    publish(engines, 0)
    updating = engines.begin_update(manifest(1, buckets=BUCKETS[:1]), {0: {}})
    with pytest.raises(CallError, match=r"engine 0: update failed: .*weight version 1 follows plan \w+, but"):
        engines.wait(updating, timeout_s=1)


def test_after_a_refusal_engines_get_the_whole_manifest_again():
    actors = [Publishes(), Publishes()]
    engines = EngineGroup(actors, num_ranks=1)
    actors[1].refuses = True
    with pytest.raises(CallError, match="engine 1: check failed"):
        publish(engines, 0)
    actors[1].refuses = False
    publish(engines, 0)
    assert actors[1].wholes == [manifest(0)]
