"""Combinations of stages that pass, with and without a warning; `test_check.py` has those that are refused."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from launcher.checks.algorithm import algorithm_problems, algorithm_warnings
from launcher.checks.check import check_run
from launcher.cluster.node import NodeResources
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import RunConfig
from megatron_rl.config import AlgorithmConfig
from megatron_rl.correction_config import BYPASS_PRESETS, CorrectionConfig, Preset
from tests.launcher.checks.test_check import Write
from tests.launcher.cluster.test_placement import run_config


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


@pytest.mark.parametrize(
    "correction",
    [
        {"preset": "decoupled_seq_is", "cap": 5.0},
        {"preset": "decoupled_geo_rs", "rejections": [{"statistic": "seq_mean_k1", "high": 1.5}]},
    ],
)
def test_what_a_preset_with_another_key_computes_can_be_kept_by_the_advice(correction: dict[str, object]) -> None:
    config = CorrectionConfig.model_validate(correction)
    (problem,) = algorithm_problems(run_config(algorithm={"correction": correction}))
    (advice,) = re.findall(r"or `algorithm\.correction=({.*})` to keep these values", problem)
    assert CorrectionConfig.model_validate(yaml.safe_load(advice)) == config.model_copy(update={"preset": "none"})


@pytest.mark.parametrize(
    "correction",
    [
        {"mode": "none", "cap": 0.5, "low": 3.0},
        {"mode": "tis_token", "cap": 1.0, "low": 3.0},
        {"mode": "icepop", "cap": 1.0, "low": 0.5},
        {"mode": "mis_geometric", "cap": 1.1, "low": 1.0},
        {"rejections": [{"statistic": "seq_mean_k3", "low": 0.0, "high": 0.01}]},
    ],
)
def test_bounds_that_keep_the_ratio_1_and_bounds_that_no_mode_reads_pass(correction: dict[str, object]) -> None:
    assert algorithm_problems(run_config(algorithm={"correction": correction})) == []


@pytest.mark.parametrize("kl", [{"place": "none", "coefficient": 0.0}, {"place": "none", "coefficient": 0.01}])
def test_a_divergence_that_is_off_on_purpose_passes(kl: dict[str, object]) -> None:
    assert algorithm_problems(run_config(algorithm={"kl": kl})) == []


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
