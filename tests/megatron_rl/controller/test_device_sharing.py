"""Device sharing: one side offloads before the other side loads."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from history import ray_wait
from megatron_rl.controller.colocation import DeviceSharing
from megatron_rl.controller.phases import PhaseClock, Phases
from megatron_rl.trainer.group import TrainerGroup
from rollout.failures import CallError
from rollout.pool import engine_call, engine_group, living_engines
from rollout.pool.engine_group import EngineGroup
from rollout.processes import ProcessId
from tests.rollout.pool.test_engine_group import DEATHS, Engine, Ray


def turns(log: list[str], *, offload: str = "all", sleep: bool = True, asleep: bool = False) -> DeviceSharing:
    trainer = SimpleNamespace(
        offload=lambda parts: log.append(f"out {'+'.join(parts)}"),
        onload=lambda: log.append("trainer in"),
        finish_unstage=lambda *, timeout_s: None,
    )
    engines = SimpleNamespace(
        sleep=lambda *, timeout_s: log.append("sleep"), wake=lambda what, *, timeout_s: log.append(f"wake {what}")
    )
    return DeviceSharing(trainer=trainer, engines=engines, offload=offload, sleep=sleep, timeout_s=1, asleep=asleep)


class Beside:
    """No response is unfinished during training."""

    @contextmanager
    def trainer_works(self) -> Iterator[None]:
        yield

    def engines_work(self) -> None:
        pass


class Ranks:
    """Trainer ranks that have ended a call only when they are waited for."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def begin(self, method: str, *args: object) -> list[str]:
        self._log.append(f"begin {method}")
        return [method]

    def wait(self, refs: list[str], method: str, *, timeout_s: float) -> list[None]:
        self._log += [f"end {ref}" for ref in refs]
        return [None for _ in refs]

    def call(self, method: str, *args: object) -> list[None]:
        return self.wait(self.begin(method, *args), method, timeout_s=1)


def step(phases: Phases, shared: DeviceSharing, log: list[str]) -> None:
    with phases.train():
        log.append("train")
    with phases.publish():
        log.append("send")
        shared.to_engines()
        log.append("probe")


def test_each_side_loads_only_after_the_other_has_offloaded():
    log: list[str] = []
    spans: list[str] = []
    shared = turns(log, asleep=True)
    phases = Phases(PhaseClock(lambda who, what, start, end: spans.append(f"{who} {what}")), shared, policy=Beside())
    with phases.publish():  # publish 0: engines went to sleep before the trainer was there
        shared.to_engines()
    assert log == ["out gradients+optimizer", "wake weights", "out weights", "wake kv_cache"]
    log.clear()
    phases.clock.begin_step()
    step(phases, shared, log)
    assert log == [
        *("sleep", "trainer in", "train"),
        *("out gradients+optimizer", "wake weights", "send", "out weights", "wake kv_cache", "probe"),
    ]
    assert spans[-4:] == ["trainer switch", "trainer train", "engines switch", "publisher publish"]
    assert set(phases.clock.seconds()) == {"switch", "train", "publish", "step", "suspended"}


def test_a_repeated_publish_brings_the_trainers_weights_back_after_the_engines_have_made_room():
    log: list[str] = []
    shared = turns(log)
    phases = Phases(PhaseClock(lambda *span: None), shared, policy=Beside())
    step(phases, shared, log)  # an engine dies during the rollout that follows, and the publish is repeated
    log.clear()
    with phases.publish():
        log.append("send")
        shared.to_engines()
    again = ["sleep", "trainer in", "out gradients+optimizer", "wake weights", "send", "out weights", "wake kv_cache"]
    assert log == again
    log.clear()
    with phases.train():
        log.append("train")
    with phases.publish():
        log.append("fails")
    with phases.publish():  # engines have memory for weights already
        log.append("send")
    assert log == [
        *("sleep", "trainer in", "train", "out gradients+optimizer", "wake weights", "fails"),
        *("out gradients+optimizer", "send"),
    ]


def test_the_trainer_leaves_the_devices_before_an_engine_starts_and_the_engine_joins_the_sleepers():
    log: list[str] = []
    shared = turns(log)
    phases = Phases(PhaseClock(lambda *span: None), shared, policy=Beside())
    started = SimpleNamespace(
        sleep=lambda *, timeout_s: log.append("new one sleeps"),
        wake=lambda what, *, timeout_s: log.append(f"new one wakes {what}"),
    )
    with phases.train():
        log.append("train")
    shared.to_start()
    shared.follow(started)
    with phases.publish():
        log.append("send")
    shared.follow(started)
    assert log == [
        *("sleep", "trainer in", "train"),
        *("out gradients+optimizer", "out weights", "new one sleeps"),
        *("trainer in", "out gradients+optimizer", "wake weights", "send"),
        *("new one sleeps", "new one wakes weights"),
    ]


def test_after_a_checkpoint_engines_need_weights_before_they_serve():
    log: list[str] = []
    shared = turns(log)
    phases = Phases(PhaseClock(lambda *span: None), shared, policy=Beside())
    assert not phases.needs_publish
    with phases.checkpoint():
        log.append("save")
    assert log == ["sleep", "trainer in", "save"]
    assert phases.needs_publish
    with phases.publish():
        shared.to_engines()
    assert not phases.needs_publish


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_engines_allocate_keys_and_values_only_after_the_trainer_has_released_what_it_sent(offload):
    log: list[str] = []
    shared = turns(log, offload=offload, asleep=True)
    shared.trainer = TrainerGroup(Ranks(log), data_ranks=[0])
    with Phases(PhaseClock(lambda *span: None), shared, policy=Beside()).publish():
        shared.trainer.unstage()  # a delivery does not wait for it
        shared.to_engines()
    assert log.index("end unstage") < log.index("wake kv_cache")
    assert log.count("end unstage") == 1


@pytest.mark.parametrize(
    ("offload", "sleep", "expected"),
    [
        ("none", True, ["sleep", "train", "wake weights", "send", "wake kv_cache", "probe"]),
        ("optimizer", False, ["trainer in", "train", "out gradients+optimizer", "send", "probe"]),
        ("all", False, ["trainer in", "train", "out gradients+optimizer", "send", "out weights", "probe"]),
    ],
)
def test_a_side_that_stays_on_the_device_is_not_offloaded(offload, sleep, expected):
    log: list[str] = []
    shared = turns(log, offload=offload, sleep=sleep)
    step(Phases(PhaseClock(lambda *span: None), shared, policy=Beside()), shared, log)
    assert log == expected


class Devices:
    """Five engines and a trainer on the same devices: who holds which memory. Engine 3 may die in a switch.

    Memory of an engine that died is free when its processes were ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (ray_wait, engine_call, engine_group, living_engines):
            monkeypatch.setattr(module, "ray", Ray)
        monkeypatch.setattr(living_engines, "kill_on_nodes", self._kill)
        self.log: list[str] = []
        self.held = {number: {"weights", "kv_cache"} for number in range(5)}
        self.answers: dict[str, object] = {}
        """Of engine 3, by call, once it dies."""
        self.engines = EngineGroup([self.engine(number) for number in range(5)], num_ranks=1)
        self.engines.finish_start(self.engines.begin_start(), timeout_s=1)
        trainer = SimpleNamespace(
            onload=self._onload,
            offload=lambda parts: self.log.append(f"out {'+'.join(parts)}"),
            finish_unstage=lambda *, timeout_s: None,
        )
        self.sharing = DeviceSharing(trainer=trainer, engines=self.engines, offload="all", sleep=True, timeout_s=1)
        self.phases = Phases(PhaseClock(lambda *span: None), self.sharing, policy=Beside())

    def engine(self, number: int) -> Engine:
        """The engine of a number. Its parts are switched as `EngineWeights` does it."""
        process = ProcessId(node_id="n", pid=number, start_ticks=0)

        def answer(call: str) -> object:
            return self.answers.get(call) if number == 3 else None

        def sleep() -> object:
            if answer("sleep") is None:
                self.held[number].clear()
            return answer("sleep")

        def wake(part: str) -> object:
            if answer("wake") is None:
                self.held[number].add(part)
            return answer("wake")

        return Engine(
            start=process, sleep=sleep, wake=wake, ping=lambda: answer("ping"), fault=lambda: answer("fault") or ""
        )

    def _kill(self, processes: list[ProcessId], *, stacks: bool) -> tuple[str, ...]:
        for process in processes:
            self.held[process.pid].clear()
        return ()

    def _onload(self) -> None:
        assert not any(self.held.values()), f"the trainer loads beside engines: {self.held}"
        self.log.append("trainer in")

    def replace(self) -> None:
        """What `restart_lost` does beside a trainer."""
        self.sharing.to_start()
        self.answers.clear()
        for number in self.engines.lost:
            self.held[number] = {"weights", "kv_cache"}
            started = EngineGroup([self.engine(number)], num_ranks=1, first=number)
            started.finish_start(started.begin_start(), timeout_s=1)
            self.sharing.follow(started)
            self.engines.replace(number, started)
        self.log.append("replaced")

    def publish(self) -> None:
        with self.phases.publish():
            assert all(self.held[number] == {"weights"} for number in self.engines.alive)
            self.log.append("send")
            self.sharing.to_engines()
        assert all(self.held[number] == {"weights", "kv_cache"} for number in self.engines.alive)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


@pytest.mark.parametrize("phase", ["train", "checkpoint"])
@pytest.mark.parametrize("death", DEATHS)
def test_the_trainer_works_after_an_engine_has_died_in_its_sleep_and_the_next_one_receives_weights_with_the_others(
    devices, death, phase
):
    devices.answers = DEATHS[death][0]("sleep")
    works = devices.phases.checkpoint() if phase == "checkpoint" else devices.phases.train(afterwards=devices.replace)
    with works:
        assert devices.engines.lost == (3,)
        devices.log.append(phase)
    if phase == "checkpoint":
        assert devices.phases.needs_publish
        devices.publish()  # the others sample a step without it
        assert devices.engines.lost == (3,) and "replaced" not in devices.log
        devices.log.clear()
        with devices.phases.train(afterwards=devices.replace):
            devices.log.append("train")
    assert devices.engines.lost == () and devices.sharing.asleep
    devices.publish()
    assert devices.log == [
        *("trainer in", "train", "out gradients+optimizer", "out weights", "replaced"),
        *("trainer in", "out gradients+optimizer", "send", "out weights"),
    ]


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("part", ["weights", "kv_cache"])
def test_a_publish_goes_on_without_an_engine_that_dies_as_it_wakes_and_a_repeated_one_finds_all_others_in_one_state(
    devices, part, death
):
    with devices.phases.train():
        pass
    if part == "weights":
        devices.answers = DEATHS[death][0]("wake")
    with suppress(CallError), devices.phases.publish():
        if part == "kv_cache":
            devices.answers = DEATHS[death][0]("wake")
            devices.sharing.to_engines()
        raise CallError("another engine dies in the update, or in the proof")
    assert devices.engines.lost == (3,)
    devices.publish()
    assert devices.engines.lost == (3,)
    devices.replace()
    devices.publish()
    assert devices.engines.lost == ()


def test_all_engines_that_die_in_their_sleep_are_replaced_and_follow_the_trainer_to_the_publish(devices):
    died = DEATHS["the actor"][0]("sleep")
    for actor in devices.engines.actors:
        actor.__dict__.update(Engine(**died).__dict__)
    with devices.phases.train(afterwards=devices.replace):
        assert devices.engines.alive == ()
    devices.publish()
    assert devices.engines.alive == tuple(range(5))


@pytest.mark.parametrize("ends", ["rollout", "train", "weights", "kv_cache", "probe"])
def test_engines_sleep_before_a_new_trainer_starts_wherever_in_a_step_the_last_one_ended(devices, ends):
    """An engine may die meanwhile; it holds nothing either."""
    with suppress(CallError):
        if ends != "rollout":
            with devices.phases.train():
                fail_if(ends == "train")
            with devices.phases.publish():
                fail_if(ends == "weights")
                devices.sharing.trainer.finish_unstage = lambda *, timeout_s: fail_if(ends == "kv_cache")
                devices.sharing.to_engines()
    devices.answers = DEATHS["the actor"][0]("sleep")
    devices.sharing.to_new_trainer()
    assert not any(devices.held.values()) and devices.sharing.asleep and not devices.sharing.has_woken_weights


def fail_if(ends: bool) -> None:
    if ends:
        raise CallError("the trainer ends")
