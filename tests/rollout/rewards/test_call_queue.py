"""The order of waiting calls, against a sort of all of them."""

from hypothesis import given
from hypothesis import strategies as st

from rollout.rewards.call import RewardRequest
from rollout.rewards.call_queue import Call, CallQueue

REQUEST = RewardRequest(function="f", data_source="", solution_str="", ground_truth="", extra_info_json="null")


def call(number: int) -> Call:
    return Call(number=number, request=REQUEST, outcome=None)


@given(numbers=st.sets(st.integers(0, 99)), alone=st.sets(st.integers(0, 99)))
def test_an_empty_worker_takes_calls_that_may_not_share_first_and_the_oldest_of_each_kind(
    numbers: set[int], alone: set[int]
) -> None:
    queue = CallQueue()
    for number in sorted(numbers, key=lambda number: number * 37 % 100):
        queue.add(call(number), alone=number in alone)
    taken = []
    while (next_call := queue.take(num_running=0, most=1)) is not None:
        taken.append((next_call[0].number, next_call[1]))
    assert taken == sorted(((number, number in alone) for number in numbers), key=lambda one: (not one[1], one[0]))


def test_a_worker_with_calls_takes_only_what_may_share_it_and_fits() -> None:
    queue = CallQueue()
    queue.add(call(0), alone=True)
    queue.add(call(1))
    assert queue.take(num_running=2, most=2) is None
    taken = queue.take(num_running=1, most=2)
    assert taken is not None and (taken[0].number, taken[1]) == (1, False)
    assert queue.take(num_running=1, most=2) is None
    assert [left.number for left in queue.take_all()] == [0] and list(queue.take_all()) == []


@given(waiting=st.dictionaries(st.integers(0, 99), st.booleans()))
def test_the_oldest_call_is_found_in_both_kinds(waiting: dict[int, bool]) -> None:
    queue = CallQueue()
    for number, is_alone in waiting.items():
        queue.add(call(number), alone=is_alone)
    assert queue.oldest_is_alone() == (bool(waiting) and waiting[min(waiting)])
