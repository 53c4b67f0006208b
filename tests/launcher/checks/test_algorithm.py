"""Combinations of stages that pass, with and without a warning; `test_check.py` has those that are refused."""

from pathlib import Path
from typing import get_args

import pytest

from launcher.checks.algorithm import algorithm_problems, algorithm_warnings
from launcher.checks.check import check_run
from launcher.cluster.node import NodeResources
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import RunConfig
from megatron_rl.config import AlgorithmConfig
from megatron_rl.correction_config import BYPASS_PRESETS, Preset
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


ONE = {"group_size": 1, "advantage": "reinforce_plus_plus"}


def test_a_filter_that_drops_right_and_wrong_groups_of_one_causes_a_warning() -> None:
    (warning,) = algorithm_warnings(AlgorithmConfig.model_validate({**ONE, "filter": "accuracy"}))
    assert "`algorithm.group_size` = 1 with `algorithm.filter` = accuracy" in warning
    assert "every response with the accuracy 0 or 1 is dropped; set filter to none" in warning


@pytest.mark.parametrize(
    "settings",
    [
        {**ONE, "filter": "none"},
        {**ONE, "filter": "zero_variance"},
        {**ONE, "filter": {"name": "accuracy", "low": -1.0}},
        {"group_size": 2, "filter": "accuracy"},
    ],
)
def test_filters_that_keep_some_right_or_wrong_groups_cause_no_warning(settings: dict[str, object]) -> None:
    assert algorithm_warnings(AlgorithmConfig.model_validate(settings)) == []


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_saved_configuration_of_a_preset_passes(write_config: Write, tmp_path: Path, preset: str) -> None:
    """The saved file spells out all keys that the preset sets, and all of the divergence, which is off."""
    loss = {"clip": "bypass", "pg": "reinforce"}.get(BYPASS_PRESETS.get(preset, ""), "clipped_surrogate")
    overrides = [f"algorithm.correction.preset={preset}", f"algorithm.loss={loss}"]
    config = load(RunConfig, write_config(""), overrides)
    saved = tmp_path / "saved.yaml"
    saved.write_text(resolved_yaml(config))
    assert load(RunConfig, saved) == config
    assert algorithm_problems(load(RunConfig, saved)) == []
