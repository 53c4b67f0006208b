from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.loading import MAX_PROBLEMS, dotted_keys, load, resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.algorithm_settings import STAGES

Write = Callable[[str], Path]


def test_defaults_fill_missing_keys(write_config: Write) -> None:
    config = load(RunConfig, write_config(""))
    assert config.num_steps == 3
    assert config.sampling.max_response_tokens == 128
    assert config.sampling.temperature == 1.0
    assert config.algorithm.correction.mode == "tis_token"


def test_an_override_replaces_one_nested_key_and_keeps_its_siblings(write_config: Write) -> None:
    config = load(RunConfig, write_config(""), ["sampling.temperature=0.6", "data.train.0.weight=2", "seed=7"])
    assert (config.sampling.temperature, config.sampling.max_response_tokens) == (0.6, 128)
    assert config.data.train[0].weight == 2
    assert config.seed == 7


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], {}),
        (["deterministic=true"], {"deterministic_mode": True}),
        (["deterministic=true", "trainer.megatron.deterministic_mode=false"], {"deterministic_mode": False}),
        (
            ["deterministic=true", "trainer.megatron.apply_rope_fusion=false"],
            {"deterministic_mode": True, "apply_rope_fusion": False},
        ),
    ],
)
def test_a_deterministic_run_asks_for_megatrons_mode_unless_the_trainer_names_it(
    write_config: Write, tmp_path: Path, overrides: list[str], found: dict[str, bool]
) -> None:
    config = load(RunConfig, write_config(""), overrides)
    assert config.trainer.megatron == found
    saved = tmp_path / "resolved.yaml"
    saved.write_text(resolved_yaml(config))
    assert load(RunConfig, saved) == config


ALIASED = """
trainer:
  optimizer: &slow
    learning_rate: 1e-6
  critic:
    optimizer: *slow
evaluation:
  sets:
    aime: &set
      path: aime24.jsonl
    copy: *set
    merged:
      <<: *set
"""


def test_an_override_changes_no_key_that_an_alias_repeats(write_config: Write) -> None:
    overrides = ["trainer.optimizer.learning_rate=5e-6", "evaluation.sets.copy.path=aime25.jsonl"]
    config = load(RunConfig, write_config(ALIASED), overrides)
    assert (config.trainer.optimizer.learning_rate, config.trainer.critic.optimizer.learning_rate) == (5e-6, 1e-6)
    paths = {name: each.path for name, each in config.evaluation.sets.items()}
    assert paths == {"aime": "aime24.jsonl", "copy": "aime25.jsonl", "merged": "aime24.jsonl"}


def test_an_alias_in_an_override_is_a_copy_too(write_config: Write) -> None:
    sets = "evaluation.sets={a: &set {path: a.jsonl}, b: *set}"
    config = load(RunConfig, write_config(""), [sets, "evaluation.sets.b.path=b.jsonl"])
    assert [each.path for each in config.evaluation.sets.values()] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(ConfigError, match="is inside its own anchor"):
        load(RunConfig, write_config(""), ["evaluation.sets=&set {a: *set}"])


@pytest.mark.parametrize("value", ["true", "2.0", "3"])
def test_a_sleep_level_is_a_whole_number_up_to_two(write_config: Write, value: str) -> None:
    with pytest.raises(ConfigError, match=r"`engine\.sleep_level` = "):
        load(RunConfig, write_config(""), [f"engine.sleep_level={value}"])
    assert load(RunConfig, write_config(""), ["engine.sleep_level=2"]).engine.sleep_level == 2


def test_a_later_override_wins(write_config: Write) -> None:
    assert load(RunConfig, write_config(""), ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_numbers_in_scientific_notation_are_numbers(write_config: Write, text: str) -> None:
    config = load(RunConfig, write_config(""), [f"trainer.optimizer.learning_rate={text}"])
    assert config.trainer.optimizer.learning_rate == 1e-4


def test_the_resolved_configuration_loads_back_to_itself(write_config: Write, tmp_path: Path) -> None:
    overrides = [
        "evaluation.sets.held.path=x.jsonl",
        "engine.vllm.block_size=32",
        "engine.vllm.attention_backend=AUTO",
        "trainer.optimizer.learning_rate=3e-7",
        "wandb.name='1e-6'",
        "cluster.slurm.partition='08'",
    ]
    config = load(RunConfig, write_config(""), overrides)
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(config))
    assert load(RunConfig, again) == config


@pytest.mark.parametrize(
    ("more", "line", "key", "nearest"),
    [
        ("trainer:\n  optimiser: {}\n", 11, "trainer.optimiser", "trainer.optimizer"),
        ("trainer:\n  optimizer:\n    betta1: 0.9\n", 12, "trainer.optimizer.betta1", "trainer.optimizer.beta1"),
        ("group_size: 8\n", 10, "group_size", "algorithm.group_size"),
        ("evaluation:\n  sets:\n    a:\n      pth: x\n", 13, "evaluation.sets.a.pth", "evaluation.sets.a.path"),
    ],
)
def test_an_unknown_key_is_refused_naming_its_line_and_the_nearest_known_one(
    write_config: Write, more: str, line: int, key: str, nearest: str
) -> None:
    path = write_config(more)
    with pytest.raises(ConfigError) as refused:
        load(RunConfig, path)
    assert f"{path}:{line}: unknown key `{key}`; did you mean `{nearest}`?" in str(refused.value)


def test_an_unknown_override_is_named_as_typed(write_config: Write) -> None:
    with pytest.raises(ConfigError, match=r"override `publish.transprt=shm`: unknown key .*`publish.transport`"):
        load(RunConfig, write_config(""), ["publish.transprt=shm"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("num_steps=many", '`num_steps` = "many": input should be a valid integer'),
        ("num_steps=true", "`num_steps` = true: input should be a valid integer"),
        ("num_steps=0", "`num_steps` = 0: input should be greater than 0"),
        (
            "engine.format=fp8",
            "`engine.format` = \"fp8\": input should be 'bf16', 'int8', 'fp8_channel' or 'fp8_block'",
        ),
        ("sampling=3", "`sampling` = 3: "),
        (
            "algorithm.filter={name: accuracy, low: 0.9, high: 0.1}",
            '`algorithm.filter` = {"name": "accuracy", "low": 0.9, "high": 0.1}: `low` = 0.9 is not below `high` = 0.1',
        ),
        (
            "algorithm.filter={name: accuracy, low: 1}",
            "`algorithm.filter.low` = 1: input should be less than 1",
        ),
        (
            "algorithm.filter={name: accuracy, high: 0}",
            "`algorithm.filter.high` = 0: input should be greater than 0",
        ),
        (
            "engine.probe_max_logprob_gap.fp8_channel=0",
            "`engine.probe_max_logprob_gap.fp8_channel` = 0: input should be greater than 0",
        ),
        ("engine.vllm.a=[1]", "`engine.vllm.a` = [1]: input should be a valid string or a valid integer"),
    ],
)
def test_a_wrong_type_names_the_value_and_the_expected_type(write_config: Write, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(RunConfig, write_config(""), [override])
    assert f"override `{override}`: {said}" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("context", "context parallelism is not supported: for packed samples it needs kernels of Transformer Engine"),
        ("virtual_pipeline", "virtual pipeline stages are not supported: at 32B on 32 H100 they would save half a per"),
    ],
)
def test_a_partition_that_the_trainer_does_not_have_is_refused_with_the_reason(
    write_config: Write, key: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(RunConfig, write_config(""), [f"trainer.parallel.{key}=2"])


def test_a_missing_key_is_named_with_its_meaning(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"key `model` is missing \(Hugging Face directory to start from"):
        load(RunConfig, path)


def test_every_problem_is_listed_up_to_one_screen(write_config: Write) -> None:
    overrides = [f"unknown_{index}=1" for index in range(MAX_PROBLEMS + 3)]
    with pytest.raises(ConfigError) as refused:
        load(RunConfig, write_config(""), overrides)
    lines = str(refused.value).splitlines()
    assert lines[0].endswith(f"{MAX_PROBLEMS + 3} problems")
    assert lines[-1].strip() == "... and 3 more"
    assert len(lines) < 24


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nseed: 2\n", "key `seed` is given twice"),
        ("- 1\n", "expected a mapping"),
        ("a: [1\n", "is not YAML"),
        ("a: !!python/object:os.system {}\n", "is not YAML"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(RunConfig, path)


def test_a_missing_file_is_named_with_the_start_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*nothing.yaml.*started in"):
        load(RunConfig, tmp_path / "nothing.yaml")


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=3", "num_steps.x=1", "data.train.7.path=x"])
def test_a_malformed_override_is_refused(write_config: Write, override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load(RunConfig, write_config(""), [override])


def test_every_dotted_key_can_be_overridden(write_config: Write) -> None:
    config = load(RunConfig, write_config(""))
    for key in dotted_keys(RunConfig):
        if key.startswith(tuple(f"{stage.key}." for stage in STAGES)):
            continue  # a setting of one of several functions
        value: object = config
        for name in key.split("."):
            value = getattr(value, name)
