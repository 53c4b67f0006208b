"""Recipes load, plan, place and render; plans are those of the record; broken variants name key, bound and fix."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from examples.recipes.convert import convert, main
from examples.recipes.plans import (
    FOLDER,
    MODELS,
    PAGE,
    PLANS,
    RECIPES,
    load_recipe,
    options,
    page_table,
    plans,
    with_table,
)
from launcher.checks.combinations import run_combinations
from launcher.cli import main as megatron_rl
from launcher.commands.plan import plan, planned_nodes
from launcher.commands.slurm import job_config, prepare
from launcher.errors import ConfigError
from megatron_rl.algorithm_settings import KeepAll
from megatron_rl.batching.selection import has_signal
from rollout.data.rows import read_rows
from rollout.types import Score, ScoreStatus
from tests.support.scored_groups import scored_group


def test_committed_plans_are_those_of_today() -> None:
    """After a change: `python -m examples.recipes.plans --write`."""
    today = plans()
    assert json.loads(PLANS.read_text(encoding="utf-8")) == today
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, page_table(today))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_renders_a_script_for_its_nodes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe(name, f"run_dir={tmp_path / 'run'}")
    _, script = prepare(job_config(config))
    assert f"#SBATCH --nodes={config.cluster.slurm.nodes}\n" in script and "#SBATCH --gpus-per-node=8\n" in script
    assert plan(config, options()) == 0
    assert len(planned_nodes(config, options())) == config.cluster.slurm.nodes
    assert "ESTIMATE" in capsys.readouterr().out


DAPO_RECIPES = tuple(name for name in RECIPES if name.startswith("dapo-"))
DYNAMIC_SAMPLING = ("algorithm.max_refill=2", "algorithm.filter=accuracy")
"""The documented overrides."""


@pytest.mark.parametrize("name", DAPO_RECIPES)
def test_the_override_of_dynamic_sampling_judges_answers_as_dapo_does(name: str) -> None:
    """verl keeps a group if its values of `acc` differ, whatever the lengths: `filter_groups.metric=acc`."""
    override = " ".join(DYNAMIC_SAMPLING)
    assert f"| `{override}` |" in PAGE.read_text(encoding="utf-8")
    assert f"# DAPO's dynamic sampling: {override}\n" in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    config = load_recipe(name, *DYNAMIC_SAMPLING)
    assert run_combinations(config) == []
    lengths = [300] * 15 + [config.sampling.max_response_tokens]
    for num_right in (0, 5, 16):
        rewards = [1.0] * num_right + [0.0] * (16 - num_right)
        scores = tuple(Score(reward=reward, status=ScoreStatus.OK) for reward in rewards)
        group = replace(scored_group(0, lengths=lengths), rewards=tuple(rewards), scores=scores)
        assert has_signal(group, config.algorithm) is (0 < num_right < 16)


@pytest.mark.parametrize("name", DAPO_RECIPES)
def test_a_recipe_without_dynamic_sampling_keeps_every_group_as_verl_does(name: str) -> None:
    assert "`run_dapo_wo_ds_qwen2.5_32b.sh`" in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert isinstance(load_recipe(name).algorithm.filter, KeepAll)


PHASES = ("rollout", "sleep", "onload", "train", "save", "offload", "wake", "publish", "wake kv")
"""Columns of the plan of a device whose engine sleeps."""

BROKEN = {
    "tensor ranks over two nodes": (
        "dapo-qwen2.5-32b-16n8g",
        ("trainer.parallel.tensor=16", "trainer.parallel.data=4"),
        ("trainer.parallel.tensor = 16 does not divide the model's 40 attention heads", "sizes that divide all"),
    ),
    "tensor ranks do not divide the heads": (
        "grpo-qwen2.5-7b-fp8-1n8g-h100",
        ("trainer.parallel.tensor=8", "trainer.parallel.data=1"),
        ("trainer.parallel.tensor = 8 does not divide", "sizes that divide all: 1, 2, 4"),
    ),
    "an engine over two nodes": (
        "grpo-qwen3-32b-4n8g",
        ("engine.tensor_parallel=16",),
        ("`engine.tensor_parallel` = 16", "8 key/value heads; 8 and its divisors do"),
    ),
    "too few GPUs": (
        "grpo-qwen3-32b-4n8g",
        ("trainer.parallel.data=4",),
        ("trainer.parallel needs 64 devices (tensor 4 x pipeline 4 x data 4), but the 4 nodes have 32",),
    ),
    "too few GPUs for both": (
        "grpo-qwen3-32b-4n8g-disaggregated",
        ("engine.num_engines=16",),
        ("`placement.mode` = disaggregated needs", "set it to colocated"),
    ),
    "keys and values do not fit": (
        "dapo-qwen2.5-32b-16n8g",
        ("engine.kv_cache_bytes=85899345920",),
        ("GiB are needed", "`engine.kv_cache_bytes` = 42949672960 frees"),
    ),
    "optimizer states do not fit beside activations": (
        "grpo-qwen3-32b-1n8g",
        ("trainer.optimizer.states_on_host=false",),
        ("GiB are needed", "`trainer.optimizer.states_on_host` = true frees"),
    ),
    "activations do not fit": (
        "grpo-qwen3-30b-a3b-fp8-4n8g",
        ("trainer.recompute=none",),
        ("GiB are needed", "`trainer.recompute` = full frees"),
    ),
    "experts do not divide": (
        "grpo-qwen3-30b-a3b-fp8-4n8g",
        ("trainer.parallel.expert=32", "trainer.parallel.data=16"),
        ("trainer.parallel.expert = 32 does not divide trainer.parallel.data = 16",),
    ),
    "experts are cut inside a block": (
        "grpo-qwen3-30b-a3b-fp8-4n8g",
        ("engine.tensor_parallel=4",),
        ("fp8_block", "engine.tensor_parallel"),
    ),
    "mini batches do not divide": (
        "dapo-qwen2.5-32b-16n8g",
        ("algorithm.prompts_per_step=500",),
        ("`algorithm.prompts_per_step` = 500 groups", "a divisor of 500"),
    ),
    "FP8 products on A100": (
        "grpo-qwen2.5-7b-int8-1n8g-a100",
        ("trainer.fp8=blockwise",),
        ("trainer.fp8", "9.0"),
    ),
    "longer than the model's positions": (
        "grpo-qwen3-32b-4n8g",
        ("sampling.max_response_tokens=65536",),
        ("`sampling.max_response_tokens` 65536", "the model has 40960 positions; lower one of them"),
    ),
    "ahead without staleness": (
        "grpo-qwen3-32b-4n8g-disaggregated",
        ("planner.max_staleness=0",),
        ("planner.max_staleness", "planner.overlap"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_variant_is_refused_with_key_bound_and_fix(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, overrides, parts = BROKEN[name]
    with pytest.raises(ConfigError) as refused:
        plan(load_recipe(recipe, *overrides), options())
    assert all(part in str(refused.value) for part in parts), str(refused.value)


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
def test_32b_fits_on_one_node_of_eight_and_a_publish_takes_a_third_of_a_device(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """While weights travel, the trainer has offloaded gradients and optimizer."""
    node = (
        *("trainer.parallel.tensor=8", "trainer.parallel.pipeline=1", "trainer.parallel.data=1"),
        *("trainer.recompute=full", "engine.tensor_parallel=8", "engine.num_engines=1", "cluster.slurm.nodes=1"),
    )
    recipe = "grpo-qwen3-32b-4n8g"
    assert plan(load_recipe(recipe, *node, f"publish.transport={transport}"), options()) == 0
    device = capsys.readouterr().out.partition("device with a trainer rank")[2].partition("available")[0]
    (total,) = [line.split()[1:] for line in device.splitlines() if line.startswith("sum ")]
    needed = dict(zip(PHASES, map(float, total), strict=True))
    assert needed["publish"] < 79.18 / 3 < needed["train"] < 79.18, needed


def test_the_command_plans_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"examples/recipes/{RECIPES[0]}.yaml"
    assert megatron_rl(["plan", path, f"model={MODELS / 'Qwen2.5-32B'}"]) == 0


DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve 1 + 1."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


def test_repeated_prompts_of_dapo_become_one_row_each(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    other = {**DAPO, "prompt": [{"role": "user", "content": "Solve 2 + 2."}]}
    source, target = tmp_path / "dapo.parquet", tmp_path / "data" / "dapo.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([DAPO, other, DAPO]), source)
    assert main([str(source), str(target)]) == 0
    first, second = read_rows(str(target))
    assert first.prompt == ({"role": "user", "content": "Solve 1 + 1."},) and first.ground_truth == "2"
    assert (second.ground_truth, second.data_source) == ("2", "math_dapo")


@pytest.mark.parametrize("names", [("Problem", "Answer"), ("problem", "answer")])
def test_problems_of_aime_are_asked_for_a_box(tmp_path: Path, names: tuple[str, str]) -> None:
    source = tmp_path / "aime-2024.jsonl"
    source.write_text(json.dumps({names[0]: "Find x.", names[1]: 204, "ID": "2024-I-1"}) + "\n")
    ((row,), count) = convert(str(source))
    assert (row["ground_truth"], row["data_source"], count) == ("204", "aime-2024", 1)
    assert "Find x." in str(row["prompt"]) and "\\boxed{}" in str(row["prompt"])


def test_a_file_of_another_shape_is_refused_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "other.jsonl"
    source.write_text('{"question": "x"}\n')
    assert main([str(source), str(tmp_path / "out.jsonl")]) == 2
    assert "line 1: has columns question, but `prompt` or `problem` is needed" in capsys.readouterr().err
