import pytest

from rollout.pool.slot_counts import SlotCounts


def test_slots_are_in_use_from_the_start_of_a_response_to_the_report_of_its_end():
    slots = SlotCounts(2, slots_per_engine=8)
    slots.begin(0, 6)
    assert (slots.used(0), slots.free(0), slots.free(1)) == (6, 2, 8)
    slots.report(0, 4)
    assert (slots.used(0), slots.free(0)) == (2, 6)
    slots.check_integrity()


def test_the_emptiest_engine_is_the_first_among_equals():
    slots = SlotCounts(3, slots_per_engine=4)
    slots.begin(0, 2)
    assert slots.emptiest([2, 1, 0]) == 1
    assert slots.emptiest([0, 2]) == 2


def test_enough_slots_are_free_when_so_many_responses_have_ended():
    slots = SlotCounts(1, slots_per_engine=8)
    slots.begin(0, 20)
    slots.report(0, slots.num_ended_for(0, 3))
    assert slots.free(0) == 3


def test_more_ended_than_begun_responses_are_refused():
    slots = SlotCounts(1, slots_per_engine=8)
    slots.begin(0, 4)
    with pytest.raises(RuntimeError, match="engine 0 has ended 5 responses, of which this pool began 4"):
        slots.report(0, 5)


def test_a_successor_counts_from_zero():
    slots = SlotCounts(1, slots_per_engine=8)
    slots.begin(0, 8)
    slots.report(0, 3)
    slots.reset(0)
    assert slots.free(0) == 8
    slots.check_integrity()
