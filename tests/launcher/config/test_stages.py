"""Functions of the algorithm's stages in a configuration: names, settings, overrides, refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.algorithm_settings import STAGES, Cispo, ClippedSurrogate
from megatron_rl.stages import PlugIn, Stage

Write = Callable[[str], Path]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.key)
def test_every_setting_of_every_function_can_be_overridden(write_config: Write, stage: Stage) -> None:
    for name, choice in stage.by_name.items():
        given = {key: field.default for key, field in choice.model_fields.items()}
        overrides = [f"{stage.key}.{key}={json.dumps(value)}" for key, value in given.items()]
        loaded = getattr(load(RunConfig, write_config(""), overrides).algorithm, stage.key.rpartition(".")[2])
        assert type(loaded) is choice
        assert loaded.name == name


def test_a_setting_turns_a_bare_name_into_a_table_and_a_name_replaces_the_table(write_config: Write) -> None:
    path = write_config("algorithm:\n  loss: cispo\n")
    assert load(RunConfig, path).algorithm.loss == Cispo()
    assert load(RunConfig, path, ["algorithm.loss.clip_high=0.5"]).algorithm.loss == Cispo(clip_high=0.5)
    table = write_config("algorithm:\n  loss: {name: cispo, clip_high: 0.5}\n")
    assert load(RunConfig, table, ["algorithm.loss=cispo"]).algorithm.loss == Cispo()
    assert load(RunConfig, table, ["algorithm.loss.clip_low=1"]).algorithm.loss == Cispo(clip_low=1, clip_high=0.5)
    unnamed = load(RunConfig, write_config(""), ["algorithm.loss.clip_high=0.28"])
    assert unnamed.algorithm.loss == ClippedSurrogate(clip_high=0.28)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "algorithm.loss.clip_hihg=0.3",
            "unknown key `algorithm.loss.clip_hihg` of `clipped_surrogate`; did you mean `clip_high`? its settings: "
            "clip_low, clip_high, dual_clip",
        ),
        (
            "algorithm.advantage={name: rloo, gamma: 1}",
            "unknown key `algorithm.advantage.gamma` of `rloo`; its settings: none",
        ),
        (
            "algorithm.loss={name: gspo, clip_low: 0.2}",
            "`algorithm.loss.clip_low` = 0.2: input should be less than or equal to 0.02",
        ),
        ("algorithm.loss=3", "`algorithm.loss` = 3"),
        (
            "algorithm.loss=cipso",
            '`algorithm.loss` = "cipso": no built-in function has this name; did you mean `cispo`?',
        ),
        ("algorithm.clip_high=0.3", "unknown key `algorithm.clip_high`; it is now `algorithm.loss.clip_high`"),
        (
            "algorithm.entropy_bonus=0.3",
            "unknown key `algorithm.entropy_bonus`; it is now `algorithm.entropy.coefficient`",
        ),
        ("algorithm.overlong_penalty=1", "it is now `algorithm.reward_shaping` = {name: overlong, penalty: ...}"),
        ("algorithm.drop_zero_variance=true", "it is now `algorithm.filter` = zero_variance"),
    ],
)
def test_a_setting_of_no_or_another_function_is_refused(write_config: Write, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(RunConfig, write_config(""), [override])
    assert f"override `{override}`: " in str(refused.value)
    assert said in str(refused.value)


def test_the_line_of_a_refused_setting_is_named(write_config: Write) -> None:
    path = write_config("algorithm:\n  loss:\n    name: cispo\n    dual_clip: 3\n")
    with pytest.raises(ConfigError, match=r":\d+: unknown key `algorithm\.loss\.dual_clip` of `cispo`"):
        load(RunConfig, path)


def test_settings_of_a_function_of_ones_own_are_kept_until_it_is_loaded(write_config: Write, tmp_path: Path) -> None:
    config = load(RunConfig, write_config(""), ["algorithm.loss.name=mine.loss", "algorithm.loss.strength=[1, 2]"])
    own = config.algorithm.loss
    assert isinstance(own, PlugIn)
    assert (own.name, own.given) == ("mine.loss", {"strength": [1, 2]})
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(config))
    assert load(RunConfig, again) == config
