"""Whole runs on a CUDA device: trainer and engine share it, every format that engines hold today."""

import json

import pytest

from tests.test_run import configuration, example, finish, rows, start  # noqa: F401

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("format", "bound"), [("bf16", 1e-3), ("int8", 5e-3)])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_run_on_one_device_keeps_sampler_and_trainer_close(example, format, bound, temperature):  # noqa: F811
    run_dir = example / f"gpu-{format}-{temperature}"
    config = configuration(
        example,
        num_steps=2,
        deterministic=False,
        sampling={"temperature": temperature, "max_response_tokens": 48},
        engine={"format": format, "max_num_seqs": 64, "kv_cache_bytes": 1 << 30},
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
