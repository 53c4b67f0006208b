"""Whole runs on a CUDA device: trainer and engine share it, every format that engines hold today."""

import json

import pytest

from tests.support.cluster.ray_nodes import ray_nodes
from tests.support.runs.whole_runs import configuration, finish, rows, start

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_run_whose_trainer_and_engine_take_turns_on_a_device_is_the_run_that_keeps_both(example):
    """The same seeds, the same kernels; a checkpoint after every step makes engines lose their weights once more."""
    steps = {}
    for name, turns in (("beside", ({}, {})), ("in-turns", ({"sleep_level": 2}, {"offload": "all"}))):
        run_dir = example / f"gpu-{name}"
        config = configuration(
            example,
            num_steps=3,
            sampling={"temperature": 1.0, "max_response_tokens": 48},
            engine={"format": "int8", "max_num_seqs": 64, "kv_cache_bytes": 1 << 30, **turns[0]},
            trainer={"dtype": "bf16", "optimizer": {"learning_rate": 1e-4}, **turns[1]},
            wandb={"mode": "disabled"},
        )
        finish(start(config, run_dir))
        steps[name] = rows(run_dir / "metrics.jsonl")
    for beside, in_turns in zip(steps["beside"], steps["in-turns"], strict=True):
        assert in_turns["timing_s/switch"] > 0 and "timing_s/switch" not in beside
        for key in ("rollout_corr/k3_kl", "actor/grad_norm", "reward/mean"):
            assert in_turns[key] == pytest.approx(beside[key], rel=1e-3, abs=1e-6), key


@pytest.mark.parametrize(
    ("format", "bound", "temperature", "transport"),
    [
        ("bf16", 1e-3, 0.6, "cuda_ipc"),
        ("bf16", 1e-3, 1.0, "shm"),
        ("int8", 5e-3, 0.6, "shm"),
        ("int8", 5e-3, 1.0, "cuda_ipc"),
        ("fp8_channel", 5e-3, 1.0, "cuda_ipc"),
        ("fp8_block", 5e-3, 1.0, "cuda_ipc"),
    ],
)
def test_a_run_on_one_device_keeps_sampler_and_trainer_close(example, format, bound, temperature, transport):
    run_dir = example / f"gpu-{format}-{temperature}"
    config = configuration(
        example,
        num_steps=2,
        deterministic=False,
        sampling={"temperature": temperature, "max_response_tokens": 48},
        engine={
            "format": format,
            "bf16_first_layers": 0,
            "bf16_last_layers": 1,
            "max_num_seqs": 64,
            "kv_cache_bytes": 1 << 30,
        },
        publish={"transport": transport},
        trainer={"dtype": "bf16", "max_micro_batch_tokens": 2048, "optimizer": {"learning_rate": 1e-4}},
        wandb={"mode": "disabled"},
    )
    output = finish(start(config, run_dir))
    if format == "int8":
        assert "Int8" in output
    for row in rows(run_dir / "metrics.jsonl"):
        assert abs(row["rollout_corr/rollout_is_mean"] - 1) < 0.01
        assert row["rollout_corr/k3_kl"] <= bound
        assert row["actor/skipped_updates"] == 0
    assert json.loads((run_dir / "checkpoints" / "2" / "state.json").read_text())["finished_steps"] == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a device for each node")
@pytest.mark.parametrize(("mode", "transport"), [("colocated", "cuda_ipc"), ("disaggregated", "nccl")])
@pytest.mark.parametrize("format", ["bf16", "int8", "fp8_channel"])
def test_weights_stay_on_devices_in_a_joined_cluster_of_two_nodes(example, mode, transport, format):
    """Colocated ranks exchange buckets by NCCL, then hand them over by CUDA IPC; both nodes share this machine."""
    run_dir = example / f"gpu-nodes-{mode}-{format}"
    num_nodes = 2
    with ray_nodes(num_nodes, devices=1, cpus=8) as address:
        config = configuration(
            example,
            num_steps=2,
            deterministic=False,
            model=str(example / "model"),
            engine={
                "format": format,
                "bf16_first_layers": 0,
                "bf16_last_layers": 1,
                "max_num_seqs": 64,
                "kv_cache_bytes": 1 << 30,
                "num_engines": num_nodes if mode == "colocated" else 1,
            },
            placement={"mode": mode},
            publish={"transport": transport},
            trainer={"dtype": "bf16", "parallel": {"data": num_nodes if mode == "colocated" else 1}},
            history={"drafts": False},  # readers of nodes that share /dev/shm would wait for each other
            wandb={"mode": "disabled"},
            cluster={"address": address, "min_nodes": num_nodes},
        )
        output = finish(start(config, run_dir))
    assert "weights go through the host" not in output
    for row in rows(run_dir / "metrics.jsonl"):
        assert abs(row["rollout_corr/rollout_is_mean"] - 1) < 0.01
        assert row["rollout_corr/k3_kl"] <= (1e-3 if format == "bf16" else 5e-3)
