"""Warnings of combinations of stages; `test_check.py` has those that are refused."""

from pathlib import Path

import pytest

from launcher.checks.algorithm import algorithm_warnings
from launcher.checks.check import check_run
from launcher.cluster.node import NodeResources
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from megatron_rl.config import AlgorithmConfig
from tests.launcher.checks.test_check import Write


def test_dynamic_sampling_that_judges_shaped_rewards_causes_a_warning(write_config: Write, node: NodeResources) -> None:
    path: Path = write_config("")
    shaped = ("algorithm.max_refill=2", "algorithm.reward_shaping=length_penalty")
    (warning,) = check_run(load(RunConfig, path, shaped), [node]).warnings
    assert "`algorithm.filter` = zero_variance and `algorithm.reward_shaping` = length_penalty" in warning
    assert "set filter to accuracy" in warning
    assert check_run(load(RunConfig, path, [*shaped, "algorithm.filter=accuracy"]), [node]).warnings == ()


@pytest.mark.parametrize("without", [{"max_refill": 0.0}, {"reward_shaping": "none"}])
def test_shaping_alone_and_dynamic_sampling_alone_cause_no_warning(without: dict[str, object]) -> None:
    settings = {"max_refill": 2.0, "reward_shaping": "overlong", **without}
    assert algorithm_warnings(AlgorithmConfig.model_validate(settings)) == []
