"""The cases of the algorithms' benchmark are runs, and its goals compare each with GRPO over the same seeds."""

import pytest

from benchmarks.learning.algorithms import CASES, GRPO, goals, order
from launcher.checks.combinations import run_combinations
from launcher.config.loading import load
from launcher.config.schema import RunConfig


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_a_valid_configuration(case: str) -> None:
    config = load(RunConfig, "examples/arithmetic/rl.yaml", CASES[case])
    assert run_combinations(config) == []
    assert (config.algorithm.advantage.name == "grpo") == case.startswith("GRPO")
    assert (config.algorithm.kl.place == "none") == (case == GRPO)


def test_every_seed_has_each_algorithm_once_in_another_order() -> None:
    runs = order(3)
    assert sorted(runs) == sorted((seed, case) for seed in (1, 2, 3) for case in CASES)
    assert {case for _, case in runs[::3]} == set(CASES), "each algorithm is first once"


def test_an_algorithm_must_gain_in_every_seed_and_end_near_grpo() -> None:
    points = {GRPO: (40.0, 44.0), "PPO with a critic": (39.0, 42.8), "GRPO, divergence in the loss": (10.0, 14.0)}
    rows = [{"seed": seed, "case": case, "points": gain} for case, of in points.items() for seed, gain in enumerate(of)]
    assert {goal.name: (round(goal.value, 6), goal.met) for goal in goals(rows)} == {
        "GRPO: gain, worst seed": (40.0, True),
        "PPO with a critic: gain, worst seed": (39.0, True),
        "GRPO, divergence in the loss: gain, worst seed": (10.0, False),
        # by hand: differences -1 and -1.2; mean -1.1, standard error 0.1, and 12.7 of these below it
        "PPO with a critic: gain beside GRPO's, lower end over seeds": (-2.37, True),
        "GRPO, divergence in the loss: gain beside GRPO's, lower end over seeds": (-30.0, False),
    }


def test_a_mean_near_grpos_whose_seeds_scatter_is_not_enough() -> None:
    points = {GRPO: (40.0, 44.0), "PPO with a critic": (36.0, 47.0), "GRPO, divergence in the loss": (40.0, 44.0)}
    rows = [{"seed": seed, "case": case, "points": gain} for case, of in points.items() for seed, gain in enumerate(of)]
    beside = {goal.name: goal.met for goal in goals(rows) if "beside" in goal.name}
    assert list(beside.values()) == [False, True]
