"""What charts draw, read back from their SVG."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.charts import SIDE, Line, line_chart, note, stacked_chart
from launcher.report.lanes import LEVELS, PART_COLOURS, areas
from launcher.report.thinning import MAX_POINTS, NUM_BUCKETS, thin
from rollout.tracing.timeline import PARTS


def points(chart: str, kind: str) -> list[tuple[int, int]]:
    """Corners of the first line or band of a chart; (0, SIDE) is the lower left corner."""
    found = re.search(f'class="{kind} [^"]*" points="([^"]*)"', chart)
    assert found is not None
    return [(int(x), int(y)) for x, y in (pair.split(",") for pair in found.group(1).split())]


def test_a_short_line_is_drawn_point_by_point_without_a_band() -> None:
    chart = line_chart([Line(label="a", at=[1, 2, 3], values=[0.0, 4.0, 1.0])])
    assert points(chart, "line") == [(0, SIDE), (SIDE // 2, 0), (SIDE, 3 * SIDE // 4)]
    assert "band" not in chart and "a <b>1</b>" in chart


def test_a_single_step_is_a_dot() -> None:
    chart = line_chart([Line(label="a", at=[3], values=[1.0])])
    assert re.findall(r'class="dot s0" d="M(\d+),', chart) == [str(SIDE // 2)]


def test_a_peak_of_one_step_of_a_long_run_reaches_the_top_of_the_band() -> None:
    values = [0.0] * 10_000
    values[5_003] = 4.0
    chart = line_chart([Line(label="faults", at=range(1, 10_001), values=values)])
    band = points(chart, "band")
    assert len(band) == 2 * NUM_BUCKETS
    (peak,) = [x for x, y in band if y == 0]
    assert peak == pytest.approx(SIDE * 5_003 / 10_000, abs=SIDE / NUM_BUCKETS)
    line = points(chart, "line")
    # the mean of 50 steps, 4 / 50, of an axis that ends at 4
    assert min(y for _, y in line) == round(SIDE * (1 - 4 / 50 / 4))
    assert (line[0][0], line[-1][0]) == (0, SIDE)


@given(values=st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=3 * MAX_POINTS))
def test_thinning_keeps_extremes_and_the_mean(values: list[float]) -> None:
    thinned = thin(range(len(values)), values)
    assert len(thinned.at) <= MAX_POINTS
    assert (thinned.lows.min(), thinned.highs.max()) == (min(values), max(values))
    assert (thinned.at[0], thinned.at[-1]) == (0, len(values) - 1)
    assert (np.diff(thinned.at) > 0).all()
    edges = np.linspace(0, len(values), len(thinned.at) + 1).astype(int)
    for index, (first, last) in enumerate(pairwise(edges)):
        mean = sum(values[first:last]) / (last - first)
        assert thinned.means[index] == pytest.approx(mean, rel=1e-9, abs=1e-6)


def test_a_logarithmic_chart_leaves_out_values_that_are_not_positive() -> None:
    assert line_chart([Line(label="a", at=[1, 2], values=[0.0, -1.0])], log=True) == ""
    chart = line_chart([Line(label="a", at=[1, 2, 3, 4], values=[1.0, 10.0, 100.0, 0.0])], log=True)
    assert points(chart, "line") == [(0, SIDE), (SIDE // 2, SIDE // 2), (SIDE, 0)]


def test_values_that_are_not_finite_are_left_out() -> None:
    assert line_chart([Line(label="a", at=[1], values=[math.nan])]) == ""
    chart = line_chart([Line(label="a", at=[1, 2, 3], values=[0.0, math.inf, 1.0])])
    assert points(chart, "line") == [(0, SIDE), (SIDE, 0)]


def test_a_limit_is_within_the_axis() -> None:
    chart = line_chart([Line(label="a", at=[1, 2], values=[0.0, 1.0])], limit=2.0)
    assert 'class="limit" d="M0,0H' in chart
    chart = line_chart([Line(label="a", at=[1, 2], values=[1.0, 10.0])], limit=100.0, log=True)
    assert 'class="limit" d="M0,0H' in chart


def test_lines_have_the_colours_of_their_legend_and_labels_are_escaped() -> None:
    chart = line_chart([Line(label=f"<{name}>", at=[1, 2], values=[0.0, 1.0]) for name in "abcdefgh"])
    drawn = re.findall(r'class="line (s\d)"', chart)
    assert drawn == re.findall(r'<i class="(s\d)">', chart) == [f"s{number % 7}" for number in range(8)]
    assert "&lt;a&gt;" in chart and "<a>" not in chart


def tops(path: str) -> list[tuple[int, int]]:
    """Height and right end of each step of an area."""
    return [(int(top), int(end)) for top, end in re.findall(r"V(\d+)H(\d+)", path)]


def test_parts_are_stacked_in_their_order() -> None:
    chart = stacked_chart(
        [Line(label="low", at=[1, 2], values=[1.0, 2.0]), Line(label="high", at=[1, 2], values=[3.0, 0.0])]
    )
    high, low = (tops(path) for path in re.findall(r'class="area s\d" d="([^"]*)"', chart))
    # each step is a bar; the axis ends at 4
    assert low == [(750, 500), (500, 1000)] and high == [(0, 500), (500, 1000)]
    assert stacked_chart([]) == stacked_chart([Line(label="a", at=[], values=[])]) == ""


def test_a_part_that_is_not_finite_or_below_zero_has_no_area_and_leaves_the_other_parts_of_its_step() -> None:
    low = Line(label="low", at=[1, 2, 3, 4], values=[1.0, math.nan, math.inf, -5.0])
    high = Line(label="high", at=[1, 2, 3, 4], values=[3.0, 2.0, 4.0, 1.0])
    chart = stacked_chart([low, high])
    upper, lower = (tops(path) for path in re.findall(r'class="area s\d" d="([^"]*)"', chart))
    # the axis ends at 4
    assert [top for top, _ in lower] == [750, SIDE, SIDE, SIDE]
    assert [top for top, _ in upper] == [0, 500, 0, 750]
    nothing = Line(label="a", at=[1, 2], values=[math.nan, math.nan])
    assert "<svg" in stacked_chart([nothing]) and "a <b>nan</b>" in stacked_chart([nothing])


def test_areas_of_a_lane_have_the_heights_of_their_shares() -> None:
    shares = np.zeros((4, len(PARTS)))
    shares[:2, 0], shares[:2, 1] = 0.6, 0.4
    shares[2, 2] = 1.0
    drawn = dict(re.findall(r'class="area ([^"]*)" d="([^"]*)"', areas(shares)))
    assert list(drawn) == [PART_COLOURS[part] for part in PARTS[2::-1]], "upper parts first"
    assert tops(drawn[PART_COLOURS[PARTS[0]]]) == [(LEVELS - 30, 2), (LEVELS, 4)]
    assert tops(drawn[PART_COLOURS[PARTS[1]]]) == [(0, 2), (LEVELS, 4)]
    assert tops(drawn[PART_COLOURS[PARTS[2]]]) == [(0, 3), (LEVELS, 4)]


def test_a_page_says_that_its_lines_are_thinned() -> None:
    assert note(MAX_POINTS) == "" and "means of neighbouring steps" in note(MAX_POINTS + 1)
