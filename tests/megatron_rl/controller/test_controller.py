"""The controller's loop: the order of its calls, recorded by small hand-written stand-ins."""

import time
from contextlib import contextmanager, nullcontext
from threading import Event

import pytest

from megatron_rl.algorithm.guard import GuardState
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.config import AlgorithmConfig
from megatron_rl.controller.colocation import KeepSampling
from megatron_rl.controller.controller import Controller, LoopSettings
from megatron_rl.controller.phases import PhaseClock, Phases
from megatron_rl.controller.publish_report import PublishReport
from megatron_rl.controller.stopping import EngineFormatError, StopRequestedError
from megatron_rl.trainer.messages import StepResult
from rollout.pool.background_thread import repeated_in_background
from rollout.types import WorkerEvents
from tests.support.scored_groups import scored_group


class Log(list):
    def phase(self, name):
        @contextmanager
        def body(afterwards=lambda: None):
            self.append(f"{name} begins")
            yield
            self.append(f"{name} ends")
            afterwards()

        return body

    def call(self, name, result=None):
        def method(*args, **kwargs):
            self.append(f"{name} {args[0]}" if args and isinstance(args[0], int | str) else name)
            return result

        return method


class StandIn:
    def __init__(self, **methods):
        self.__dict__.update(methods)


def history(log):
    return StandIn(
        prefetch=lambda running, upcoming: log.append(f"prefetch {upcoming}, keep {running}"),
        place=lambda homes: log.append(f"place {homes}"),
        discard_drafts=log.call("discard drafts"),
        record_rewards=lambda groups: log.append(f"record rewards of {len(groups)}"),
        metrics=lambda: {"history/bytes": 1.0},
    )


def publish_report():
    return PublishReport(
        declines_delta=False,
        received_bytes=0,
        weight_version=0,
        wire_bytes=1,
        scales_s=0.0,
        pack_s=0.0,
        send_s=0.0,
        drain_s=0.0,
        num_in_flight=0,
        num_recomputed_tokens=0,
        pause_s=0.0,
        apply_s=0.0,
        deliver_s=0.0,
        sums_s=0.0,
        probe_s=0.0,
        weight_gaps=(0.0,),
        probe_gaps=(0.0,),
        codes={},
    )


def controller(
    log, *, num_steps, first_step=0, evaluate_every=0, checkpoint_every=0, history=None, needs_publish=False
):
    groups = [scored_group(0), scored_group(1)]
    report = publish_report()
    phases = StandIn(
        needs_publish=needs_publish,
        engines_sleep=False,
        clock=StandIn(
            begin_step=lambda: None,
            awake_s=time.perf_counter,
            seconds=lambda: {"rollout": 1.0, "step": 2.0},
            suspension=StandIn(watched=nullcontext),
        ),
        **{name: log.phase(name) for name in ("rollout", "train", "publish", "evaluate", "checkpoint")},
    )
    return Controller(
        planner=StandIn(
            due=log.call("due", StandIn(groups=groups, plan="plan")),
            outdated=lambda step: [],
            put_back=lambda groups: None,
            consumed=lambda groups: log.append(f"consumed {len(groups)}"),
            upcoming=lambda step, engines: StandIn(groups="train", plan="plan"),
            metrics=lambda: {},
            num_waits=None,
        ),
        pool=StandIn(
            samples_whole_steps=False,
            num_reissued=0,
            num_hung=0,
            num_scorer_restarts=0,
            reward_workers=WorkerEvents(),
            migration=StandIn(num_moved=0),
            loads=lambda: [],
            homes=lambda: "running",
            planned=lambda groups, plan="": groups if isinstance(groups, str) else plan,
            admit=log.call("admit"),
            take_batch=lambda step, progress, refill: groups,
            drop=lambda group_ids: [],
        ),
        trainer=StandIn(
            train=log.call("train", StepResult(metrics={}, num_optimizer_steps=1, num_skipped_updates=0)),
            ranks=StandIn(check_idle=lambda: None),
        ),
        publisher=StandIn(publish=log.call("publish", report)),
        restarter=StandIn(restart_lost=lambda ask_ranks=False: 0, num_restarts=0, num_serving=1, num_lost_nodes=0),
        phases=phases,
        evaluator=StandIn(
            admit=lambda pool, step: log.append(f"evaluation admitted {step}"),
            take=lambda pool, step, progress: log.append(f"evaluate {step}") or [],
            upcoming=lambda step: "evaluation",
        ),
        recorder=StandIn(
            on_progress=lambda *a: None,
            on_step=lambda step, metrics, groups: log.append(f"record {step}"),
            on_evaluation=lambda rows: None,
            save=lambda step, trainer, planner, guard: log.append(f"save {step}"),
            finish_save=lambda: log.append("finish save"),
        ),
        algorithm=AlgorithmConfig(group_size=4, prompts_per_step=2),
        settings=LoopSettings(
            num_steps=num_steps,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            max_micro_batch_tokens=64,
            data_parallel=1,
            costs=CostModel(parity_tokens=100),
            seed=0,
        ),
        history=history,
        first_step=first_step,
    )


def test_weights_are_published_before_the_first_token_and_after_every_step():
    log = Log()
    controller(log, num_steps=2).run()
    assert [entry for entry in log if entry.startswith(("publish ", "due", "train"))] == [
        "publish begins",
        "publish 0",
        "publish ends",
        "due 0",
        "train begins",
        "train",
        "train ends",
        "publish begins",
        "publish 1",
        "publish ends",
        "due 1",
        "train begins",
        "train",
        "train ends",
        "publish begins",
        "publish 2",
        "publish ends",
    ]


def test_a_step_is_recorded_before_it_is_saved_and_its_prompts_are_consumed_before_both():
    log = Log()
    controller(log, num_steps=2, checkpoint_every=1).run()
    kept = [entry for entry in log if entry.startswith(("consumed", "record", "save"))]
    assert kept == ["consumed 2", "record 0", "save 1", "consumed 2", "record 1", "save 2"]


def test_only_the_end_and_a_stop_wait_for_a_save():
    log = Log()
    controller(log, num_steps=2, checkpoint_every=1).run()
    assert [entry for entry in log if "save" in entry] == ["save 1", "save 2", "finish save"]
    for checkpoint_every in (0, 1):
        log = Log()
        with pytest.raises(StopRequestedError, match="after step 1"):
            stopping(log, answers=[False, False, True], num_steps=5, checkpoint_every=checkpoint_every).run()
        assert [entry for entry in log if "save" in entry] == ["save 1", "finish save"]


def test_engines_that_slept_during_a_save_get_weights_before_the_next_step():
    log = Log()
    controller(log, num_steps=2, checkpoint_every=1, needs_publish=True).run()
    kept = [entry for entry in log if entry.startswith(("save", "due")) or entry in ("publish 1", "publish 2")]
    assert kept == ["due 0", "publish 1", "save 1", "publish 1", "due 1", "publish 2", "save 2"]


def test_a_publish_in_which_an_engine_dies_is_repeated_with_a_new_engine():
    log, lost = Log(), [1]
    run = controller(log, num_steps=1)
    publish = run.publisher.publish

    def dies_once(version):
        report = publish(version)
        if version == 1 and lost:
            raise RuntimeError("engine 0: update failed")
        return report

    run.publisher = StandIn(publish=dies_once)

    def replace(ask_ranks=False):
        log.append("replace" if not ask_ranks else "look and replace")
        return lost.pop() if "publish 1" in log and lost else 0

    run.restarter = StandIn(restart_lost=replace, num_restarts=1, num_serving=1, num_lost_nodes=0)
    run.run()
    kept = [entry for entry in log if entry in ("publish 1", "replace", "look and replace")]
    assert kept == ["replace", "publish 1", "look and replace", "publish 1"]
    assert run.num_repeated_publishes == 1


def test_groups_start_on_other_engines_while_a_lost_engine_restarts():
    """A group ends during the restart, which ends only when the pool has started the next one."""
    log, has_ended, has_started = Log(), Event(), Event()
    run = controller(log, num_steps=1)

    def take_turn():
        if has_ended.is_set() and not has_started.is_set():
            log.append("start next group")
            has_started.set()
        return False

    def restart(ask_ranks=False):
        log.append("restart")
        has_ended.set()
        assert has_started.wait(timeout=10), "the pool waits for the restart"
        log.append("restarted")
        return 1

    run.pool.run_in_background = lambda: repeated_in_background(take_turn, name="pool")
    run.phases = Phases(PhaseClock(lambda *span: None), policy=KeepSampling(run.pool))
    run.restarter = StandIn(restart_lost=restart, num_restarts=1, num_serving=2, num_lost_nodes=0)
    run.run()
    kept = [entry for entry in log if entry in ("train", "restart", "start next group", "restarted", "publish 1")]
    assert kept == ["train", "restart", "start next group", "restarted", "publish 1"]
    assert run.num_trained == 1


def test_totals_count_on_after_a_restart_of_the_trainer():
    first = controller(Log(), num_steps=1)
    first.pool.num_reissued, first.pool.num_scorer_restarts, first.num_repeated_publishes = 1, 2, 3
    first.pool.reward_workers = WorkerEvents(num_restarts=4, num_repeated=5, num_strays=6)
    first.pool.migration.num_moved, first.planner.num_waits = 7, 8
    rows = []
    for num_reissued in (0, 2):
        again = controller(Log(), num_steps=1)
        again.earlier = first.totals()
        again.pool.num_reissued, again.planner.num_waits = num_reissued, 0
        again.recorder.on_step = lambda step, metrics, groups: rows.append(metrics)
        again.run()
    before = {
        "engine/reissued_groups": 1.0,
        "reward/scorer_restarts": 2.0,
        "publish/repeated": 3.0,
        "reward/worker_restarts": 4.0,
        "reward/repeated_calls": 5.0,
        "reward/stray_processes": 6.0,
        "planner/moved_groups": 7.0,
        "planner/waits_for_age": 8.0,
    }
    assert [{name: row[name] for name in before} for row in rows] == [before, before | {"engine/reissued_groups": 3.0}]


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_an_engine_that_died_between_two_steps_is_replaced_before_a_deterministic_run_gives_it_groups(is_deterministic):
    log, dead = Log(), [1]
    run = controller(log, num_steps=2, checkpoint_every=1)
    run.pool.samples_whole_steps = is_deterministic

    def replace(ask_ranks=False):
        return dead.pop() if ask_ranks and "save 1" in log and dead else 0

    run.restarter = StandIn(restart_lost=replace, num_restarts=1, num_serving=1, num_lost_nodes=0)
    run.run()
    kept = [entry for entry in log if entry.startswith(("save", "publish ", "due")) and not entry.endswith("s")]
    again = ["publish 1"] if is_deterministic else []
    assert kept == ["publish 0", "due 0", "publish 1", "save 1", *again, "due 1", "publish 2", "save 2"]
    assert run.num_repeated_publishes == len(again)


def test_a_publish_that_fails_while_all_engines_live_ends_the_run():
    log = Log()
    run = controller(log, num_steps=1)

    def refused(version):
        raise RuntimeError("engine 0 refused weight version 0")

    run.publisher = StandIn(publish=refused)
    with pytest.raises(RuntimeError, match="refused"):
        run.run()


def test_a_resumed_run_publishes_its_own_version_and_does_not_evaluate_the_start_again():
    log = Log()
    controller(log, num_steps=4, first_step=3).run()
    assert [entry for entry in log if entry.startswith(("publish ", "evaluate "))][:2] == [
        "publish begins",
        "publish 3",
    ]
    assert [entry for entry in log if entry in ("evaluate 0", "evaluate 3", "evaluate 4")] == ["evaluate 4"]


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 5]), (2, [0, 2, 4, 5])])
def test_evaluations_come_before_the_first_step_when_due_and_after_the_last(every, steps):
    log = Log()
    controller(log, num_steps=5, evaluate_every=every).run()
    assert [int(entry.split()[1]) for entry in log if entry[:9] == "evaluate " and entry[-1].isdigit()] == steps


def test_history_is_requested_before_the_trainer_starts_and_before_the_first_token():
    log = Log()
    controller(log, num_steps=2, evaluate_every=2, history=history(log)).run()
    words = ("prefetch", "place", "discard drafts", "admit", "record rewards", "train begins", "evaluat")
    assert [entry for entry in log if entry.startswith(words)] == [
        "prefetch ['evaluation', 'train'], keep running",
        "discard drafts",
        "evaluate begins",
        "evaluation admitted 0",
        "place ['running', 'plan']",
        "admit",
        "evaluate 0",
        "evaluate ends",
        "discard drafts",
        "record rewards of 2",
        "prefetch ['train'], keep running",
        "train begins",
        "place ['running', 'plan']",
        "admit",
        "record rewards of 2",
        "prefetch ['evaluation'], keep running",
        "train begins",
        "evaluate begins",
        "evaluation admitted 2",
        "evaluate 2",
        "evaluate ends",
        "discard drafts",
    ]


def test_the_next_step_starts_beside_an_evaluation_once_and_not_in_a_run_whose_batches_may_not_depend_on_timing():
    for whole_step, expected in (
        (False, ["due 0", "evaluate 0", "train", "due 1", "train", "due 2", "evaluate 2", "train", "evaluate 3"]),
        (True, ["evaluate 0", "due 0", "train", "due 1", "train", "evaluate 2", "due 2", "train", "evaluate 3"]),
    ):
        log = Log()
        run = controller(log, num_steps=3, evaluate_every=2)
        run.pool.samples_whole_steps = whole_step
        run.run()
        words = ("due", "train", *(f"evaluate {step}" for step in range(4)))
        assert [entry for entry in log if entry in words or entry.startswith("due")] == expected


def test_nothing_starts_beside_an_evaluation_for_engines_that_the_guard_replaces():
    log = Log()
    run = controller(log, num_steps=3, evaluate_every=1)
    run.guard = StandIn(
        needs_other_engines=True,
        state=GuardState(),
        in_force=StandIn(cap=2.0, overlap=None),
        after_step=lambda step, metrics, published: {},
    )
    run.planner.limit_overlap = lambda overlap: None
    run.first_step, run.saved_step = 1, 1
    with pytest.raises(EngineFormatError):
        run.run()
    assert [entry for entry in log if entry.startswith(("due", "evaluate 2"))] == ["due 1", "evaluate 2"]


def test_nothing_starts_before_a_save_in_which_engines_sleep():
    log = Log()
    run = controller(log, num_steps=3, evaluate_every=1, checkpoint_every=2)
    run.phases.engines_sleep = True
    run.run()
    found = [entry for entry in log if entry.startswith(("due", "evaluate ")) and entry[-1].isdigit()]
    assert found == ["due 0", "evaluate 0", "due 1", "evaluate 1", "evaluate 2", "due 2", "evaluate 3"]


def test_drafts_of_an_attempt_that_a_lost_trainer_ended_count_for_no_step():
    log = Log()
    controller(log, num_steps=4, first_step=3, history=history(log)).run()
    entries = [entry for entry in log if entry.startswith(("publish 3", "discard drafts", "admit"))]
    assert entries[:3] == ["publish 3", "discard drafts", "admit"]


def stopping(log, *, answers, **settings):
    """A controller that is asked to stop when `answers` say so, one for each time that it looks."""
    run = controller(log, **settings)
    run.stop_requested = iter(answers).__next__
    groups = run.pool.take_batch(0, None, None)

    def take_batch(step, progress, refill):
        progress(1, 2)
        progress(2, 2)
        return groups

    run.pool.take_batch = take_batch
    return run


def test_a_stop_between_steps_saves_what_is_finished_and_ends_the_run():
    log = Log()
    with pytest.raises(StopRequestedError, match="after step 1") as stopped:
        stopping(log, answers=[False, False, True], num_steps=5).run()
    assert stopped.value.step == 1
    kept = [entry for entry in log if entry.startswith(("due", "consumed", "record", "save"))]
    assert kept == ["due 0", "consumed 2", "record 0", "save 1"]


def test_a_stop_during_a_rollout_leaves_it_and_consumes_nothing_of_the_step():
    log = Log()
    with pytest.raises(StopRequestedError, match="after step 1"):
        stopping(log, answers=[False, False, False, True], num_steps=5).run()
    kept = [entry for entry in log if entry.startswith(("due", "consumed", "record", "save", "train begins"))]
    assert kept == ["due 0", "consumed 2", "train begins", "record 0", "due 1", "save 1"]


def test_a_stop_saves_nothing_that_is_saved_already_and_nothing_before_the_first_step():
    log = Log()
    with pytest.raises(StopRequestedError, match="after step 1"):
        stopping(log, answers=[False, False, True], num_steps=5, checkpoint_every=1).run()
    assert [entry for entry in log if entry.startswith("save")] == ["save 1"]
    for first_step in (0, 3):
        log = Log()
        with pytest.raises(StopRequestedError, match=f"after step {first_step}"):
            stopping(log, answers=[False, True], num_steps=5, first_step=first_step).run()
        assert [entry for entry in log if entry.startswith("save")] == []


def test_a_stop_after_the_last_rollout_comes_too_late():
    log = Log()
    stopping(log, answers=[False, False], num_steps=1).run()
    assert "save 1" in log
