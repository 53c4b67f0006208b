import pytest

from launcher.commands.requeue import MAX_REQUEUES, decide, may_start
from launcher.endings.kinds import Ending

STOPPED = Ending.STOPPED.code


def test_a_run_that_stopped_for_the_time_limit_is_requeued() -> None:
    found = decide(STOPPED, asked=True, node_lost=False, starts=[0], step=12)
    assert (found.again, found.why) == (True, "the run stopped on request after step 12: requeued")


def test_a_run_that_was_stopped_by_hand_is_not() -> None:
    found = decide(STOPPED, asked=False, node_lost=False, starts=[0], step=12)
    assert not found.again and "by hand" in found.why


@pytest.mark.parametrize(("code", "node_lost", "again"), [(9, False, True), (5, False, True), (143, True, True)])
def test_a_lost_process_or_node_is_requeued(code: int, node_lost: bool, again: bool) -> None:
    assert decide(code, asked=False, node_lost=node_lost, starts=[0], step=0).again is again


@pytest.mark.parametrize("code", [0, 2, 3, 6, 7, 8, 70, 130, 143])
def test_other_ends_are_not_requeued(code: int) -> None:
    assert not decide(code, asked=False, node_lost=False, starts=[0], step=0).again


def test_a_node_that_is_lost_after_the_end_changes_nothing() -> None:
    assert not decide(0, asked=False, node_lost=True, starts=[0], step=3).again


def test_without_a_new_step_there_are_two_requeues_and_no_more() -> None:
    starts: list[int] = []
    again = True
    while again:
        starts.append(0)
        again = decide(STOPPED, asked=True, node_lost=False, starts=starts, step=0).again
    assert len(starts) == 1 + MAX_REQUEUES
    assert not may_start(starts, 0)
    assert may_start(starts, 1)


def test_a_new_step_allows_two_more() -> None:
    assert decide(STOPPED, asked=True, node_lost=False, starts=[0, 0, 0], step=1).again
    assert decide(9, asked=False, node_lost=False, starts=[0, 0, 0, 1, 1], step=1).again
    assert not decide(9, asked=False, node_lost=False, starts=[0, 0, 0, 1, 1, 1], step=1).again


def test_slurm_requeues_by_itself_are_counted_too() -> None:
    """A node failure ends the batch script, so that nothing was decided; the next start finds its predecessors."""
    assert may_start([4, 4], 4)
    assert not may_start([4, 4, 4], 4)
