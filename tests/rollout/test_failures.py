"""Texts of places."""

import pytest

from rollout.failures import Place, ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0, 1"),
        ((2, 0, 1, 5), "0-2, 5"),
        (range(512), "0-511"),
        ((7, 9, 10), "7, 9, 10"),
    ],
)
def test_runs_of_three_or_more_numbers_are_written_as_a_range(numbers, text):
    assert ranges(numbers) == text


def test_a_place_names_ranks_in_short():
    assert str(Place(role="trainer", ranks=tuple(range(8)), node="n1")) == "trainer rank 0-7, node n1"
