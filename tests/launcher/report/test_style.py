"""Every colour that a page uses is defined for light and for dark ground, and can be seen there."""

import re

import pytest

from launcher.report.charts import NUM_COLOURS
from launcher.report.lanes import ACTIVITY_LABELS, PART_COLOURS
from launcher.report.style import STYLE

CARDS = {"light": "#ffffff", "dark": "#1e293b"}
USED = [*(f"s{number}" for number in range(NUM_COLOURS)), *PART_COLOURS.values(), *ACTIVITY_LABELS]


def colours(ground: str) -> dict[str, str]:
    light, _, dark = STYLE.partition("@media (prefers-color-scheme: dark)")
    text = light if ground == "light" else dark
    return dict(re.findall(r"\.([\w-]+) \{ --c: (#\w{6}); \}", text))


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", CARDS)
def test_every_colour_is_defined_once(ground: str) -> None:
    found = colours(ground)
    assert set(found) == set(USED)
    assert len({found[f"s{number}"] for number in range(NUM_COLOURS)}) == NUM_COLOURS
    of_time = [found[name] for name in USED if not re.fullmatch(r"s\d", name)]
    assert len(set(of_time)) == len(of_time)


@pytest.mark.parametrize("ground", CARDS)
def test_lines_stand_out_from_their_ground(ground: str) -> None:
    """WCAG 2.1 asks for a contrast of 3 for graphics."""
    for number in range(NUM_COLOURS):
        assert contrast(colours(ground)[f"s{number}"], CARDS[ground]) >= 3, number
