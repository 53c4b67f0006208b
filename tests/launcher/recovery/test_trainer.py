"""Which failures of a trainer are repaired, and in which order the rest of the run is made ready."""

from types import SimpleNamespace

import pytest

from launcher.commands.assembly import may_pass
from launcher.recovery.restart_limit import WINDOW_STEPS, RestartLimit
from launcher.recovery.trainer import TrainerRestarts
from launcher.run_dir.status import StatusFile
from rollout.failures import CallError, DeadlineError, Place, ProcessLostError, StepLostError

TRAINER = Place(role="trainer", ranks=(1,))


def restarts(log=None, *, max_restarts=2, unplaced="", lost=(), newest_step=lambda: 0) -> TrainerRestarts:
    log = [] if log is None else log

    def note(text, answer=None):
        return lambda *args, **kwargs: (log.append(text), answer)[1]

    engines = SimpleNamespace(start_over=note("engines start over"))
    nodes = SimpleNamespace(follow=lambda suspects=(): None, unplaced=unplaced, placement=SimpleNamespace(trainers=()))
    return TrainerRestarts(
        running=SimpleNamespace(trainers=["the trainer"], end_trainer=note("forget it")),
        lost_engines=SimpleNamespace(
            engines=engines, nodes=nodes, find=note("engines lost?", lost), start_again=note("lost engines start")
        ),
        history=SimpleNamespace(connect=note("history connects")),
        update_timeout_s=5.0,
        limit=RestartLimit(max_restarts=max_restarts, newest_step=newest_step),
        say=log.append,
    )


@pytest.mark.parametrize("kind", [ProcessLostError, DeadlineError, CallError])
def test_a_failure_of_the_trainer_is_repaired_so_often_and_no_more(kind):
    error, some = kind("gone", TRAINER), restarts()
    for num_steps in (3, 0):
        some.check(error)
        some.count(num_steps)
    assert (some.repeated.num_restarts, some.repeated.num_steps) == (2, 3)
    with pytest.raises(kind) as caught:
        some.check(error)
    assert "`trainer.max_restarts` = 2" in caught.value.__notes__[0]


def fail_again_and_again(tmp_path, trainers, *, most: int) -> tuple[TrainerRestarts, int]:
    """Each trainer takes steps from a checkpoint and fails: its first step, and the steps that are finished then.

    Returns the restarts, and the trainers that failed before the run ended, `most` if it did not end.
    """
    status = StatusFile(run_dir=tmp_path, num_steps=10_000)
    some = restarts(newest_step=lambda: status.newest_step)
    for number, (first_step, finished_steps) in zip(range(most), trainers, strict=False):
        status.step = first_step
        for step in range(first_step, finished_steps):
            status.finished(step)
        try:
            some.check(ProcessLostError("gone", TRAINER))
        except ProcessLostError:
            return some, number
        some.count(finished_steps - first_step)
    return some, most


def test_a_trainer_that_fails_now_and_then_is_always_replaced(tmp_path):
    """The third failure comes when the first one no longer counts; every failure costs 20 steps."""
    trainers = ((step - 20, step) for step in range(WINDOW_STEPS // 2, 2_000, WINDOW_STEPS // 2))
    some, num_failed = fail_again_and_again(tmp_path, trainers, most=30)
    assert (num_failed, some.repeated.num_restarts, some.repeated.num_steps) == (30, 30, 600)


@pytest.mark.parametrize(
    ("trainers", "reason"),
    [
        ([(0, 150)] * 9, "it repeats more steps than the window has, and never gets further"),
        ([(7, 7)] * 9, "it never finishes a step"),
        ([(step, step + 1) for step in range(9)], "it fails after each step and its checkpoint"),
        ([(0, 300), (250, 260), (250, 365)], "steps below the newest one are repeated"),
    ],
)
def test_a_crash_loop_of_the_trainer_is_ended(tmp_path, trainers, reason):
    assert fail_again_and_again(tmp_path, trainers, most=9)[1] == 2, reason


def test_other_failures_and_lost_nodes_end_the_run():
    with pytest.raises(ProcessLostError):
        restarts().check(ProcessLostError("gone", Place(role="engine", ranks=(0,))))
    with pytest.raises(ProcessLostError):
        restarts(max_restarts=0).check(ProcessLostError("gone", TRAINER))
    log = []
    with pytest.raises(DeadlineError):
        restarts(log, unplaced="no node replaces node3").check(DeadlineError("late", TRAINER))
    assert "node3" in log[0]


def test_a_deterministic_step_that_lost_its_engine_is_taken_again():
    restarts().check(StepLostError("engine 0 died", Place(role="engine", ranks=(0,))))


def test_devices_are_free_and_engines_empty_before_a_trainer_starts():
    log = []
    ranks = SimpleNamespace(kill_and_wait=lambda: log.append("ranks end"))
    pool = SimpleNamespace(cancel=lambda: log.append("groups end"))
    sharing = SimpleNamespace(to_new_trainer=lambda: log.append("engines sleep"))
    error = ProcessLostError("gone", TRAINER)
    restarts(log, lost=(1,)).clear(error, SimpleNamespace(ranks=ranks), pool, sharing)
    assert log == [
        *("ranks end", "groups end", "engines start over", "engines sleep"),
        *("engines lost?", "lost engines start", "history connects"),
    ]


def test_a_node_that_is_missed_after_the_ranks_have_ended_ends_the_run():
    log = []
    ranks = SimpleNamespace(kill_and_wait=lambda: log.append("ranks end"))
    with pytest.raises(ProcessLostError):
        restarts(log, unplaced="no node replaces node3").clear(
            ProcessLostError("gone", TRAINER), SimpleNamespace(ranks=ranks), None, None
        )
    assert log[0] == "ranks end" and "node3" in log[1] and len(log) == 2


@pytest.mark.parametrize(
    ("error", "num_trained", "passes"),
    [
        (ProcessLostError("gone", TRAINER), 0, True),
        (DeadlineError("late", TRAINER), 0, True),
        (CallError("NCCL error: unhandled system error", TRAINER), 1, True),
        (CallError("the loss is a fish", TRAINER), 0, False),
        (CallError("CUDA out of memory", TRAINER), 3, False),
        (CallError("CUDA error: out of memory", TRAINER), 3, False),
        (CallError("CUDA Error: out of memory at cumem_allocator.cpp:119", TRAINER), 3, False),
        (CallError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", TRAINER), 3, False),
        (CallError("unhandled cuda error\nCuda failure 2 'out of memory'", TRAINER), 3, False),
        (CallError("No space left on device", TRAINER), 3, False),
    ],
)
def test_an_error_that_would_come_again_is_not_tried_again(error, num_trained, passes):
    assert may_pass(error, SimpleNamespace(num_trained=num_trained)) is passes
    assert may_pass(error, None) is not isinstance(error, CallError)
