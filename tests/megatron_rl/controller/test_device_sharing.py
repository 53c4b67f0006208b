"""Device sharing: one side offloads before the other side loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron_rl.controller.colocation import DeviceSharing
from megatron_rl.controller.phases import PhaseClock, Phases


def turns(log: list[str], *, offload: str = "all", sleep: bool = True, asleep: bool = False) -> DeviceSharing:
    trainer = SimpleNamespace(
        offload=lambda parts: log.append(f"out {'+'.join(parts)}"), onload=lambda: log.append("trainer in")
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
