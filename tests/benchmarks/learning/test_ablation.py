"""Every arm is compared seed by seed with the arm in which everything is off."""

import pytest

from benchmarks.harness.paired import Difference
from benchmarks.harness.record import Row
from benchmarks.learning.ablation import ARMS, BASE, differences, goals, keys
from launcher.checks.combinations import run_combinations
from launcher.config.loading import load
from launcher.config.schema import RunConfig


def runs(**lost: float) -> list[Row]:
    """Three seeds, each twice as slow as the one before; `all` needs half of the base's time."""
    return [
        {
            "what": "run",
            "seed": seed,
            "arm": arm,
            "step_s": 2.0**seed / (2 if arm.startswith("all") else 1),
            "held_out_after": 0.9 + 0.01 * seed - lost.get(arm, 0.0),
            "k3_median": 1e-3,
        }
        for seed in (1, 2, 3)
        for arm in ARMS
    ]


def test_differences_are_within_seeds() -> None:
    found = {row["arm"]: row for row in differences(runs(int8=0.05))}
    assert set(found) == set(ARMS) - {BASE}
    assert found["all"]["speed"] == pytest.approx(2) and found["all"]["speed_low"] == pytest.approx(2)
    assert found["int8"]["held_out_points"] == pytest.approx(-5) and found["int8"]["speed"] == 1
    assert {goal.name for goal in goals(list(found.values())) if not goal.met} == {"int8: held-out lost"}


def test_an_interval_contains_the_mean_of_noise_in_most_cases() -> None:
    import random

    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        low, high = Difference.of([rng.gauss(1, 2) for _ in range(3)]).interval
        held += low <= 1 <= high
    assert 0.93 <= held / 2000 <= 0.97


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_valid_configuration(arm: str) -> None:
    config = load(RunConfig, "examples/arithmetic/rl.yaml", keys(arm))
    assert run_combinations(config) == []
    assert config.history.drafts == ("drafts" in arm or arm.startswith("all"))
    assert (config.engine.format, config.engine.num_engines) == (
        "int8" if arm.startswith(("int8", "all")) else "bf16",
        2,
    )
