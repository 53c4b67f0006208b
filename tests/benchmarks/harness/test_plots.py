"""Pictures beside records stay legible."""

import re

import pytest

from benchmarks.harness.plots import Series, lines


def chart_share(svg: str) -> float:
    """Width of the axes over the width of the picture."""
    whole = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    corners = re.search(r'id="axes_1">\s*<g id="patch_2">\s*<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) ', svg)
    assert whole is not None and corners is not None
    return (float(corners[2]) - float(corners[1])) / float(whole[1])


@pytest.mark.parametrize("label", ["one", "a label of more than thirty characters"])
@pytest.mark.parametrize("number", [1, 4, 7])
def test_a_legend_leaves_the_width_to_the_chart(label: str, number: int) -> None:
    series = [Series(label=f"{label} {each}", steps=[0, 1, 2], values=[0.1, 0.2, each]) for each in range(number)]
    svg = lines("picture", series, unit="accuracy")
    assert chart_share(svg) > 0.8
    assert svg.count(label) >= (number if number > 1 else 0)
