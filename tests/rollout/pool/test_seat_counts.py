import pytest

from rollout.pool.seat_counts import SeatCounts


def test_seats_are_in_use_from_the_start_of_a_response_to_the_report_of_its_end():
    seats = SeatCounts(2, seats_per_engine=8)
    seats.begin(0, 6)
    assert (seats.used(0), seats.free(0), seats.free(1)) == (6, 2, 8)
    seats.report(0, 4)
    assert (seats.used(0), seats.free(0)) == (2, 6)
    seats.check_integrity()


def test_enough_seats_are_free_when_so_many_responses_have_ended():
    seats = SeatCounts(1, seats_per_engine=8)
    seats.begin(0, 20)
    seats.report(0, seats.num_ended_for(0, 3))
    assert seats.free(0) == 3


def test_the_seats_of_a_group_that_has_returned_are_free_without_a_report():
    seats = SeatCounts(2, seats_per_engine=8)
    seats.begin(0, 6)
    seats.begin(0, 2)
    seats.report(0, 3)
    seats.returned(0, 2)
    assert seats.used(0) == 5, "the group may be among those that the engine has reported"
    seats.returned(0, 6)
    assert (seats.used(0), seats.free(0)) == (0, 8)
    seats.report(0, 5)  # the engine has answered before the group returned
    assert seats.used(0) == 0
    seats.check_integrity()


def test_more_ended_than_begun_responses_are_refused():
    seats = SeatCounts(1, seats_per_engine=8)
    seats.begin(0, 4)
    with pytest.raises(RuntimeError, match="engine 0 has ended 5 responses, of which this pool began 4"):
        seats.report(0, 5)


def test_a_successor_counts_from_zero():
    seats = SeatCounts(1, seats_per_engine=8)
    seats.begin(0, 8)
    seats.returned(0, 3)
    seats.reset(0)
    assert seats.free(0) == 8
    seats.begin(0, 4)
    seats.returned(0, 1)
    assert seats.free(0) == 5
    seats.check_integrity()
