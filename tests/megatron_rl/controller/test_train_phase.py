"""Engines during training: the calls that each policy makes. And the seconds of phases."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

from history.patience import LOOK_S
from megatron_rl.controller import phases as module
from megatron_rl.controller import suspension
from megatron_rl.controller.colocation import KeepSampling, PauseEngines
from megatron_rl.controller.phases import PhaseClock, Phases
from megatron_rl.controller.suspension import Suspension
from tests.support.deadline import DEADLINE_S


class Engines:
    def __init__(self):
        self.calls = []

    def pause_sampling(self, *, timeout_s):
        self.calls.append("pause_sampling")

    def resume_sampling(self, *, timeout_s):
        self.calls.append("resume_sampling")


class Pool:
    def __init__(self, log, has_groups=True):
        self.log = log
        self.has_groups = has_groups

    @contextmanager
    def run_in_background(self):
        self.log.append("pool works")
        yield
        self.log.append("pool stops")


def one_step(phases, log):
    with phases.rollout():
        log.append("rollout")
    with phases.train():
        log.append("train")
    with phases.publish():
        log.append("publish")


def test_alternating_engines_are_paused_from_training_until_the_next_rollout():
    engines = Engines()
    phases = Phases(PhaseClock(lambda *span: None), policy=PauseEngines(engines, Pool([]), timeout_s=1))
    one_step(phases, engines.calls)
    with phases.checkpoint():
        pass
    one_step(phases, engines.calls)
    step = ["rollout", "pause_sampling", "train", "publish"]
    assert engines.calls == [*step, "resume_sampling", *step]


def test_engines_without_requests_are_not_paused():
    engines = Engines()
    pool = Pool([], has_groups=False)
    phases = Phases(PhaseClock(lambda *span: None), policy=PauseEngines(engines, pool, timeout_s=1))
    one_step(phases, engines.calls)
    assert engines.calls == ["rollout", "train", "publish"]
    pool.has_groups = True  # groups of the next step, which an evaluation has let begin
    with phases.checkpoint():
        engines.calls.append("save")
    assert engines.calls[3:] == ["pause_sampling", "save"]


def test_what_follows_training_belongs_to_the_phase_and_not_to_its_seconds():
    log = []
    clock = PhaseClock(lambda actor, activity, start_s, end_s: log.append(f"span of {actor}: {activity}"))
    with Phases(clock, policy=KeepSampling(Pool(log))).train(afterwards=lambda: log.append("restart")):
        log.append("train")
    assert log == ["pool works", "train", "span of trainer: train", "restart", "pool stops"]


def test_engines_on_other_devices_keep_sampling_during_training():
    log = []
    one_step(Phases(PhaseClock(lambda *span: None), policy=KeepSampling(Pool(log))), log)
    assert log == ["rollout", "pool works", "train", "pool stops", "pool works", "publish", "pool stops"]


def test_a_step_in_which_the_job_was_stopped_is_as_long_as_without_the_stop(monkeypatch, caplog):
    """The job is stopped for an hour in the rollout; the thread that looks at the clock has not noticed it yet."""
    now, spans = [50.0], []
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0], time=lambda: 1e9 + now[0]))
    clock = PhaseClock(lambda *span: spans.append(span))
    clock.suspension = Suspension(lambda: now[0])
    with clock.suspension.watched():
        clock.begin_step()
        with clock.phase("engines", "rollout"):
            now[0] += 4.0
            clock.suspension.seconds()
            now[0] += 3600.0 + LOOK_S
        now[0] += 2.0
        assert clock.seconds() == {"rollout": 4.0 + LOOK_S, "step": 6.0 + LOOK_S, "suspended": 3600.0}
        clock.begin_step()
        assert clock.seconds() == {"step": 0.0, "suspended": 0.0}
        now[0] += 7200.0 + LOOK_S  # in an evaluation
        clock.begin_step()
        now[0] += 1.0
        assert clock.seconds() == {"step": 1.0, "suspended": 7200.0}
        clock.begin_step()
        assert clock.seconds() == {"step": 0.0, "suspended": 0.0}
    assert spans == [("engines", "rollout", 1e9 + 50.0, 1e9 + 54.0 + 3600.0 + LOOK_S)], "on the wall clock"
    assert caplog.messages == [
        f"the controller was stopped for {seconds} s, perhaps with the whole job; it goes on"
        for seconds in (3600, 7200)
    ]
    now[0] += 3600.0  # nobody watches
    assert clock.seconds()["suspended"] == 0.0


def test_a_thread_looks_at_the_clock_in_a_long_phase(monkeypatch):
    monkeypatch.setattr(suspension, "LOOK_S", 0.001)
    readings = []
    with Suspension(lambda: readings.append(0.0) or 0.0).watched():
        until = time.monotonic() + DEADLINE_S
        while len(readings) < 5:
            assert time.monotonic() < until
            time.sleep(0.001)
