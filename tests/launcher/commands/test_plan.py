"""`megatron-rl plan` as a person calls it; the models are `config.json` files without weights."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli import main
from tests.support.deadline import DEADLINE_S

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
FITS = """
engine:
  format: fp8_channel
  num_engines: 8
  tensor_parallel: 2
  kv_cache_bytes: 21474836480
  sleep_level: 2
algorithm: {prompts_per_step: 64, group_size: 16}
trainer:
  parallel: {tensor: 8, data: 2}
  optimizer: {distributed: true}
  recompute: full
  offload: all
"""
Plan = Callable[..., int]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Plans a run that fits on two nodes of 8 H100, with the given changes; returns the exit code."""

    def run(*arguments: str, model: dict[str, object] = DENSE) -> int:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(model))
        path = tmp_path / "run.yaml"
        path.write_text(
            f"model: {tmp_path / 'model'}\nrun_dir: {tmp_path / 'run'}\nnum_steps: 100\n"
            "data:\n  train: [{path: nowhere.jsonl}]\n  max_prompt_tokens: 2048\n"
            f"sampling: {{max_response_tokens: 16384}}\ncheckpoint: {{every: 20}}\n{FITS}"
        )
        return main(["plan", str(path), "--nodes", "2", *arguments])

    return run


def test_the_plan_of_a_run_that_fits_has_memory_and_time(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("# 2 node(s) of 8 x H100 80GB SXM (79.18 GiB)")
    assert "device with a trainer rank and an engine rank (x 16)" in lines
    assert "# time: an ESTIMATE from a roofline; nothing was measured" in lines
    assert any(line.startswith("step ") and line.endswith("GPU-hours") for line in lines)
    assert "lengths: assumed; state them, or name a run by --lengths" in lines


def test_a_plan_warns_of_a_long_run_without_checkpoints(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("checkpoint.every=0") == 0
    assert capsys.readouterr().err.startswith("warning: `checkpoint.every` = 0 saves after the last of 100 steps only")


def test_the_kind_of_gpu_is_that_of_the_option_then_that_of_the_job(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("cluster.slurm.gpu=h200") == 0
    assert "8 x H200 141GB SXM" in capsys.readouterr().out
    assert plan("cluster.slurm.gpu=h200", "--gpu", "b200") == 0
    assert "8 x B200 180GB SXM" in capsys.readouterr().out


def test_figures_for_machines_are_stable_and_add_up(plan: Plan, tmp_path: Path) -> None:
    texts = []
    for name in ("one.json", "two.json"):
        assert plan("--json", str(tmp_path / name)) == 0
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    figures = json.loads(texts[0])
    assert figures["fits"] and figures["problems"] == []
    device = figures["memory"][0]
    worst = device["phases"][device["worst_phase"]]
    assert sum(worst.values()) == device["needed_bytes"] <= device["available_bytes"]
    seconds = figures["time"]
    parts = ("rollout_s", "train_s", "publish_s", "switches_s")
    assert seconds["step_s"] == pytest.approx(sum(seconds[part] for part in parts), rel=1e-3)
    assert seconds["gpu_hours"] == pytest.approx(seconds["step_s"] * 100 * 16 / 3600, rel=1e-3)


BROKEN: dict[str, tuple[list[str], list[str]]] = {
    "tensor ranks beyond a node": (
        ["trainer.parallel.tensor=16", "trainer.parallel.data=1"],
        ["`trainer.parallel.tensor` = 16 devices inside one node", "of 8 devices", "lower `trainer.parallel.tensor`"],
    ),
    "a KV cache that does not fit": (
        ["engine.kv_cache_bytes=96636764160"],
        [
            "in `rollout`, but 79.18 GiB are available",
            "`engine.kv_cache_bytes` = 48318382080 frees 47.25 GiB and suffices",
        ],
    ),
    "an optimizer that is not distributed": (
        ["trainer.optimizer.distributed=false"],
        ["in `train`, but 79.18 GiB are available", "`trainer.optimizer.distributed` = true frees", "and suffices"],
    ),
    "samples too long for the activations": (
        ["trainer.recompute=none", "sampling.max_response_tokens=32768"],
        [
            "in `train`, but 79.18 GiB are available",
            "`trainer.recompute` = full frees",
            "`sampling.max_response_tokens` = 16384",
        ],
    ),
    "heads that the engine does not divide": (
        ["engine.tensor_parallel=3"],
        ["`engine.tensor_parallel` = 3 does not divide the model's 64 attention heads"],
    ),
    "disaggregated without devices for the engines": (
        ["placement.mode=disaggregated", "engine.sleep_level=0", "trainer.offload=none"],
        ["16 trainer rank(s) and 16 engine rank(s) that share none", "the 2 nodes have 16", "set it to colocated"],
    ),
    "sleep in a disaggregated run": (
        ["placement.mode=disaggregated", "trainer.offload=none", "engine.num_engines=2"],
        ["`placement.mode` = disaggregated with `engine.sleep_level` = 2", "set engine.sleep_level to its default"],
    ),
    "sleep with deltas": (
        ["publish.delta=true"],
        ["`engine.sleep_level` = 2 with `publish.delta` = true", "turn one of them off"],
    ),
    "pinned copies above the host's memory": (
        ["--host-gib", "400"],
        ["host of a node", "but 400.00 GiB are available", "`trainer.offload` ="],
    ),
    "an object store above /dev/shm": (
        ["--shm-gib", "16", "cluster.object_store_bytes=34359738368"],
        [
            "/dev/shm of a node",
            "but 16.00 GiB are available",
            "`cluster.object_store_bytes` = 17179869184 frees 16.00 GiB",
        ],
    ),
    "a bucket above the memory of a device": (
        [
            *(
                "placement.mode=disaggregated",
                "engine.sleep_level=0",
                "trainer.offload=none",
                "trainer.parallel.data=1",
            ),
            *("engine.num_engines=4", "trainer.optimizer.distributed=false", "publish.bucket_bytes=34359738368"),
        ],
        ["in `publish`, but 79.18 GiB are available", "`publish.bucket_bytes` = 17179869184 frees"],
    ),
    "a KV cache below one sequence": (
        ["engine.kv_cache_bytes=1073741824"],
        [
            "2048 + `sampling.max_response_tokens` 16384 = 18432 tokens need",
            "`engine.kv_cache_bytes` = 1073741824; raise",
        ],
    ),
}


@pytest.mark.parametrize("variant", BROKEN)
def test_a_broken_variant_is_refused_with_key_bound_and_fix(
    plan: Plan, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
    arguments, expected = BROKEN[variant]
    assert plan(*arguments) == 2
    refusal = capsys.readouterr().err
    assert [part for part in expected if part not in refusal] == [], refusal


@pytest.mark.parametrize(
    ("expert", "expected"),
    [
        (3, "trainer.parallel.expert = 3 does not divide the model's 128 experts"),
        (8, "trainer.parallel.expert = 8 does not divide trainer.parallel.data = 4"),
    ],
)
def test_a_broken_partition_of_experts_is_refused(
    plan: Plan, capsys: pytest.CaptureFixture[str], expert: int, expected: str
) -> None:
    partition = ["trainer.parallel.tensor=4", "trainer.parallel.data=4", f"trainer.parallel.expert={expert}"]
    assert plan(*partition, model=EXPERTS) == 2
    assert expected in capsys.readouterr().err


def test_the_same_arithmetic_refuses_a_job(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`slurm` also needs the files of a run, which are missing here; the shortage of memory is in the same list."""
    assert plan("engine.kv_cache_bytes=96636764160") == 2
    job = [f"cluster.slurm.{key}" for key in ("nodes=2", "gpus_per_node=8", "cpus_per_node=96")]
    capsys.readouterr()
    assert main(["slurm", str(tmp_path / "run.yaml"), *job, "engine.kv_cache_bytes=96636764160", "--dry-run"]) == 2
    assert "`engine.kv_cache_bytes` = 48318382080 frees" in capsys.readouterr().err


def test_a_small_model_in_8_bits_is_warned_of(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model={**DENSE, "num_hidden_layers": 16}) == 0
    warning = capsys.readouterr().err
    assert "`engine.format` = fp8_channel: the model has 9." in warning and "below about 14 billion" in warning


def test_groups_that_replace_others_are_said_to_be_missing_in_the_estimate(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan() == 0
    assert capsys.readouterr().err == ""
    assert plan("algorithm.max_refill=2", "cluster.object_store_bytes=536870912") == 0
    assert capsys.readouterr().err == (
        "warning: `algorithm.max_refill` = 2: the estimate counts the rollout of 64 groups, and a step may sample 192; "
        "the rollout then takes about 3.0 times as long\n"
    )
    assert plan("algorithm.max_refill=2", "algorithm.reward_shaping=length_penalty") == 0
    assert "= zero_variance and `algorithm.reward_shaping` = length_penalty" in capsys.readouterr().err


def test_stated_and_recorded_lengths_enter_the_estimate(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"response_length/mean": 4000, "response_length/max": 9000, "prompt_length/mean": 300, '
        '"history/tokens_per_forward": 1.5}\n'
    )
    assert plan("--lengths", str(tmp_path / "metrics.jsonl")) == 0
    recorded = capsys.readouterr().out
    for line in ("prompt_tokens: 300.0", "response_tokens: 4000.0", "tokens_per_forward: 1.5", "verified_tokens: 2.0"):
        assert line in recorded
    assert plan("--lengths", str(tmp_path / "metrics.jsonl"), "--tokens-per-forward", "3") == 0
    assert "tokens_per_forward: 3.0" in capsys.readouterr().out
    assert plan("--lengths", str(tmp_path / "metrics.jsonl"), "--response-tokens", "400") == 2
    assert "leave out --prompt-tokens and --response-tokens" in capsys.readouterr().err
    assert plan("--prompt-tokens", "300", "--response-tokens", "4000") == 0
    assert "lengths: stated" in capsys.readouterr().out
    for wrong, said in {
        "--response-tokens=20000": "at most the longest response of 16384 tokens",
        "--lengths=nowhere": "--lengths = nowhere: no run directory",
        "--product-share=1.5": "--product-share = 1.5 is no share",
        "--nodes=-1": "--nodes = -1 is negative",
    }.items():
        assert plan(wrong) == 2
        assert said in capsys.readouterr().err


def test_a_plan_of_64_nodes_takes_seconds_and_imports_nothing_heavy(plan: Plan, tmp_path: Path) -> None:
    assert plan(model=EXPERTS) == 0
    code = (
        "import sys, launcher.cli\n"
        "done = launcher.cli.main(sys.argv[1:])\n"
        "sys.exit(done or any(name in sys.modules for name in ('torch', 'ray', 'vllm', 'megatron')))\n"
    )
    sizes = ["trainer.parallel.tensor=2", "trainer.parallel.data=256", "trainer.parallel.expert=8"]
    engines = ["engine.num_engines=256", "algorithm.prompts_per_step=512"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", str(tmp_path / "run.yaml"), *sizes, *engines, "--nodes", "64"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # CPU time: others load the machine


def test_a_run_whose_number_of_steps_fills_the_memory_is_told_so(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan reads no data, so it counts a prompt of its own for every group."""
    assert plan("num_steps=1000000000") == 2
    assert "are available; `num_steps` = 500000000 frees 21457." in capsys.readouterr().err
