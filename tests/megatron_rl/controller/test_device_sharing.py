"""Device sharing: one side offloads before the other side loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron_rl.controller.colocation import DeviceSharing
from megatron_rl.controller.phases import PhaseClock, Phases
from megatron_rl.trainer.group import TrainerGroup


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
    assert set(phases.clock.seconds()) == {"switch", "train", "publish", "step"}


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
