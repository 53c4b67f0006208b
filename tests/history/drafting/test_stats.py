import dataclasses

import pytest

from history.drafting.stats import CALIBRATION_BINS, DraftStats
from history.types import prompt_key


def bins(**values: float) -> tuple[float, ...]:
    return tuple(values.get(f"b{number}", 0) for number in range(CALIBRATION_BINS))


def test_stats_are_added_field_by_field() -> None:
    one = DraftStats(num_rows=2, num_emitted=6, num_drafted=8, num_accepted=4, accepted_by_source=(3, 1, 0, 0))
    two = DraftStats(num_rows=4, num_emitted=6, num_drafted=4, num_accepted=2, accepted_by_source=(0, 0, 0, 2))
    both = one + two
    assert (both.num_rows, both.num_emitted, both.accepted_by_source) == (6, 12, (3, 1, 0, 2))
    assert both.metrics()["history/tokens_per_forward"] == 2.0
    assert both.metrics()["history/acceptance_rate"] == 0.5
    assert both.metrics()["history/accepted_share/history"] == 0.5


def test_a_mean_without_observations_is_left_out_and_sums_are_zero() -> None:
    assert DraftStats().metrics() == {
        "history/drafted_tokens": 0.0,
        "history/accepted_tokens": 0.0,
        "history/damaged_segments": 0.0,
        "history/propose_s": 0.0,
        "history/saved_s_estimated": 0.0,
    }
    assert DraftStats().calibration_error() is None


@pytest.mark.parametrize(
    ("stats", "means"),
    [
        (DraftStats(num_rows=2, num_emitted=3), {"tokens_per_forward": 1.5}),
        (DraftStats(num_drafted=4), {"acceptance_rate": 0.0}),
        (DraftStats(num_requests=5), {"hit_rate": 0.0}),
        (DraftStats(num_requests=5, num_hits=1), {"hit_rate": 0.2}),
    ],
)
def test_each_mean_needs_its_own_observations_only(stats: DraftStats, means: dict[str, float]) -> None:
    found = {name: value for name, value in stats.metrics().items() if name not in DraftStats().metrics()}
    assert found == {f"history/{name}": value for name, value in means.items()}


def test_calibration_error_is_the_weighted_gap() -> None:
    stats = DraftStats(
        calibration_count=tuple(int(x) for x in bins(b2=10, b18=30)),
        calibration_predicted=bins(b2=1.0, b18=27.0),
        calibration_survived=tuple(int(x) for x in bins(b2=2, b18=24)),
    )
    assert stats.calibration_error() == pytest.approx((1 + 3) / 40)


def test_every_field_is_a_sum() -> None:
    for field in dataclasses.fields(DraftStats):
        assert field.type in (int, float, "int", "float") or "tuple" in str(field.type)


def test_prompt_keys_are_stable_and_fit_63_bits() -> None:
    assert prompt_key("train/0") == prompt_key("train/0") != prompt_key("train/1")
    assert 0 <= prompt_key("train/17") < 1 << 63
