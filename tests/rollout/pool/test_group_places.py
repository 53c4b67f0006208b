"""A group's way through the pool, with numbers for calls."""

import pytest

from rollout.pool.group_places import GroupPlaces, Sampled
from tests.support.scored_groups import scored_group


def places_of(count):
    places = GroupPlaces()
    places.admit([scored_group(number).group for number in range(count)])
    return places


def sampled(number):
    made = scored_group(number)
    return Sampled(summary=made.summary, columns=made.columns)


def occupied(places):
    return [len(place) for place in (places.waiting, places.generating, places.scoring, places.scored)]


def test_a_group_passes_the_four_places_in_order():
    places, made = places_of(2), scored_group(1)
    places.start(1, "sampling", engine=3, incarnation=0, columns=made.columns)
    assert occupied(places) == [1, 1, 0, 0]
    assert (places.generating["sampling"].group.group_id, places.generating["sampling"].engine) == (1, 3)
    places.submit("sampling", "scoring", sampled(1), scorer=2)
    assert occupied(places) == [1, 0, 1, 0]
    assert (places.scoring["scoring"].scorer, places.scoring["scoring"].sampled.summary) == (2, made.summary)
    places.complete("scoring", made)
    assert occupied(places) == [1, 0, 0, 1]
    places.check_integrity()
    (taken,) = places.take([1])
    assert taken is made
    assert occupied(places) == [1, 0, 0, 0]


def test_an_interrupted_group_waits_again_with_its_responses_or_without():
    places = places_of(2)
    for number in range(2):
        places.start(number, f"call {number}", engine=0, incarnation=0, columns=scored_group(number).columns)
    had = sampled(1)
    places.interrupt("call 0")
    places.interrupt("call 1", had)
    assert places.waiting[0].sampled is None and places.waiting[1].sampled is had
    places.start(1, "again", engine=1, incarnation=0, columns=had.columns)
    assert occupied(places) == [1, 1, 0, 0]
    places.check_integrity()


def test_groups_of_a_purpose_and_a_step_are_found_in_every_place():
    places = places_of(4)
    for number in (1, 2, 3):
        places.start(number, f"sampling {number}", engine=0, incarnation=0, columns=None)
    for number in (2, 3):
        places.submit(f"sampling {number}", f"scoring {number}", sampled(number), scorer=0)
    places.complete("scoring 3", scored_group(3))
    assert occupied(places) == [1, 1, 1, 1]
    assert places.ids("train", 0) == [0, 1, 2, 3]
    assert places.ids("train", 1) == [] == places.ids("gsm8k", 0)
    places.check_integrity()


@pytest.mark.parametrize(
    "move",
    [
        lambda places: places.start(7, "call", engine=0, incarnation=0, columns=None),
        lambda places: places.interrupt("call"),
        lambda places: places.submit("call", "scoring", sampled(0), scorer=0),
        lambda places: places.complete("scoring", scored_group(0)),
        lambda places: places.take([0]),
    ],
    ids=["start", "interrupt", "submit", "complete", "take"],
)
def test_a_group_that_is_elsewhere_does_not_move(move):
    places = places_of(1)
    with pytest.raises(KeyError):
        move(places)
    assert occupied(places) == [1, 0, 0, 0]


def test_a_group_in_two_places_is_an_error():
    places = places_of(1)
    places.start(0, "call", engine=0, incarnation=0, columns=None)
    places.admit([scored_group(0).group])
    with pytest.raises(AssertionError, match="in two places"):
        places.check_integrity()
