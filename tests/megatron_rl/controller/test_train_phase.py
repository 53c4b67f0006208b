"""Engines during training: the calls that each policy makes."""

from contextlib import contextmanager

from megatron_rl.controller.colocation import KeepSampling, PauseEngines
from megatron_rl.controller.phases import PhaseClock, Phases


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
