"""Lanes of the fleet: one for each engine and trainer rank, under the name of its node."""

import re
from pathlib import Path

import pytest

from launcher.report.fleet import NUM_BINS, TRAINER_ACTIVITIES, fleet_section
from launcher.report.lanes import PART_COLOURS
from launcher.report.run_timeline import RunTimeline
from launcher.report.timeline_section import last_steps
from launcher.report.write import read_record
from launcher.run_dir.places import Places, read_places
from rollout.tracing.timeline import Part
from tests.support.runs.synthetic_run import PLACES, write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet") / "run"
    write_run(path)
    return path


@pytest.fixture(scope="module")
def timeline(run_dir: Path) -> RunTimeline:
    return read_record(run_dir).timeline


def bars(lane: str) -> list[tuple[float, float, str]]:
    rects = re.findall(r'<rect x="([^"]+)" width="([^"]+)" height="50" class="([^"]+)"/>', lane)
    return [(float(begin), float(width), colour) for begin, width, colour in rects]


def test_every_engine_and_rank_has_a_lane_below_its_node(run_dir: Path, timeline: RunTimeline) -> None:
    assert read_places(run_dir) == PLACES
    section = fleet_section(timeline, PLACES, last_steps(timeline.steps))
    names = re.findall(r"<p>(node\d)</p>|<span>((?:engine|trainer) \d)</span>", section)
    assert [node or lane for node, lane in names] == [
        *("node1", "trainer 0", "engine 0", "engine 1"),
        *("node2", "trainer 1", "engine 2"),
    ]


def test_lanes_show_where_the_time_went(timeline: RunTimeline) -> None:
    steps = last_steps(timeline.steps)
    lanes = re.findall(r'<div class="lane">.*?</div>', fleet_section(timeline, PLACES, steps))
    trainer, engine = bars(lanes[0]), bars(lanes[1])
    assert sum(width for _, width, _ in engine) == pytest.approx(NUM_BINS, rel=1e-3)
    waits = sum(width for _, width, colour in engine if colour == PART_COLOURS[Part.TRAINER_WAIT])
    trains = sum(width for _, width, colour in trainer if colour == "train")
    assert waits == pytest.approx(trains, abs=2 * len(steps))  # bins at both ends of each phase
    # of three seconds a step
    assert trains == pytest.approx(NUM_BINS * 3.0 * len(steps) / (steps[-1].end_s - steps[0].start_s), rel=1e-3)
    assert {colour for _, _, colour in trainer} <= set(TRAINER_ACTIVITIES)


def test_a_run_without_places_or_steps_has_no_fleet(timeline: RunTimeline, tmp_path: Path) -> None:
    assert read_places(tmp_path) is None
    assert fleet_section(timeline, None, last_steps(timeline.steps)) == ""
    assert fleet_section(timeline, PLACES, []) == ""


def test_nodes_come_in_the_order_of_their_first_process() -> None:
    places = Places(engines=("b", "c"), trainers=("a", "b"))
    assert list(places.by_node()) == [("a", [0], []), ("b", [1], [0]), ("c", [], [1])]
