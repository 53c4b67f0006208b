"""Ticks of axes: round, distinct, in order, and where they say they are."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.report.scale import SUFFIXES, Scale, figure, linear, logarithmic

UNITS = {suffix: 10.0**power for power, suffix in SUFFIXES.items()}
FINITE = st.floats(min_value=-1e12, max_value=1e12).map(lambda value: float(f"{value:.6g}"))


def value_of(label: str) -> float:
    """The number that a reader takes from a label."""
    return float(label[:-1]) * UNITS[label[-1]] if label[-1] in UNITS else float(label)


def check_ticks(scale: Scale, *, log: bool) -> None:
    shares = [share for share, _ in scale.ticks]
    labels = [label for _, label in scale.ticks]
    assert shares == sorted(shares) and all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
    assert len(set(labels)) == len(labels)
    for share, label in scale.ticks:
        position = scale.low + share * (scale.high - scale.low)
        if log:
            assert 10**position == pytest.approx(value_of(label), rel=1e-6)
        else:
            assert position == pytest.approx(value_of(label), rel=1e-6, abs=1e-6 * (scale.high - scale.low))


@given(low=FINITE, length=st.floats(min_value=1e-6, max_value=10.0), widen=st.booleans())
def test_ticks_of_a_linear_axis_are_where_their_labels_say(low: float, length: float, widen: bool) -> None:
    high = low + length * max(abs(low), 1e-3)
    scale = linear(low, high, intervals=4, widen=widen)
    check_ticks(scale, log=False)
    assert len(scale.ticks) <= 7
    if widen:
        margin = 1e-6 * (high - low)
        assert scale.low <= low + margin and scale.high >= high - margin and len(scale.ticks) >= 2


@given(low=st.integers(min_value=0, max_value=10**6), num_steps=st.integers(min_value=1, max_value=10**6))
def test_ticks_of_an_axis_of_steps_are_steps(low: int, num_steps: int) -> None:
    scale = linear(low, low + num_steps, intervals=5, whole=True)
    check_ticks(scale, log=False)
    assert scale.ticks and all(abs(step - round(step)) < 1e-6 for step in (value_of(text) for _, text in scale.ticks))


@example(low=1.0, decades=1.000000001)
@given(low=st.floats(min_value=1e-9, max_value=1e9), decades=st.floats(min_value=0.0, max_value=12.0))
def test_ticks_of_a_logarithmic_axis_are_where_their_labels_say(low: float, decades: float) -> None:
    scale = logarithmic(low, low * 10**decades, intervals=4)
    check_ticks(scale, log=True)
    assert 2 <= len(scale.ticks) <= 8
    assert 10**scale.low <= low * (1 + 1e-6) and 10**scale.high >= low * 10**decades * (1 - 1e-6)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.2, 0.701, ["0.2", "0.4", "0.6", "0.8"]),
        (3_110.0, 32_800.0, ["0", "10k", "20k", "30k", "40k"]),
        (5.6e-7, 1.55e-6, ["0.5e-6", "1.0e-6", "1.5e-6", "2.0e-6"]),
        (0.0, 4.0, ["0", "1", "2", "3", "4"]),
        (0.0, 0.0, ["0", "0.5", "1.0"]),
        (64.0, 64.0, ["0", "20", "40", "60", "80"]),
    ],
)
def test_an_axis_of_values_has_round_labels_of_one_unit(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in linear(low, high, intervals=4, widen=True).ticks] == labels


def test_an_axis_of_one_step_has_that_step() -> None:
    scale = linear(7.0, 7.0, intervals=5, whole=True)
    assert list(scale.ticks) == [(0.5, "7")] and scale.share(7.0) == 0.5


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.70051, "0.7005"), (11_928.4, "11.93k"), (3.3e10, "33G"), (1.1e-6, "1.1e-06"), (0.0, "0"), (-20_000.0, "-20k")],
)
def test_a_figure_has_four_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_figure_that_is_not_finite_is_shown() -> None:
    assert (figure(math.nan), figure(math.inf)) == ("nan", "inf")
