"""Each workaround is still needed. A test that fails here says: upstream has mended it, drop the workaround."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rollout.process_env import ProcessEnv
from tests.rollout.conftest import ROOT
from tests.rollout.test_publish import gap


def test_onednn_int8_is_right_after_every_reload(oracle):
    for weights, answer in zip("ABA", oracle.answers["push-qwen3-ABA-int8-onednn"], strict=True):
        expected = oracle.fresh("qwen3", weights, "int8", onednn=True)
        assert answer["tokens"] == expected["tokens"]
        assert gap(answer["logprobs"], expected["logprobs"]) == 0
        assert "onednn" in dict(answer["kernels"])["model.layers.0.mlp.down_proj"]


def test_a_tied_head_is_still_stale_after_a_reload_without_the_workaround(oracle):
    name = "push-qwen2-AB-bf16-without_quirk"
    answer, expected = oracle.answers[name][1], oracle.fresh("qwen2", "B", "bf16")
    assert np.abs(np.subtract(answer["probe"], expected["probe"])).mean() > 0.5


ONEDNN_READS_SCALES_LATER = """
import torch
from vllm.platforms import current_platform
import vllm.v1.worker.cpu_worker
from vllm import _custom_ops as ops
from rollout import vllm_quirks
torch.manual_seed(0)
if KEEP:
    vllm_quirks.int8_logits_are_uniform_after_reload()
weight = torch.randint(-99, 99, (64, 32), dtype=torch.int8)
scales = torch.rand(32, 1) + 0.5
handler = ops.create_onednn_scaled_mm(weight.t().contiguous().t(), scales, torch.bfloat16, True, False, 32)
x = torch.randn(4, 64, dtype=torch.bfloat16)
codes, x_scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
def run():
    out = torch.empty(4, 32, dtype=torch.bfloat16)
    ops.onednn_scaled_mm(handler, codes, out, x_scales, None, None, None)
    return out
before = run().clone()
scales.zero_()
print("same" if torch.equal(before, run()) else "different")
"""


def _onednn(keep: bool) -> str:
    environment = os.environ | ProcessEnv(single_node=True).engine(threads=1) | {"PYTHONPATH": str(ROOT)}
    script = f"KEEP = {keep}\n{ONEDNN_READS_SCALES_LATER}"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


def test_onednn_still_reads_the_scales_through_a_pointer_that_it_does_not_own():
    assert _onednn(keep=False) == "different"


def test_a_kept_copy_of_the_scales_is_what_onednn_reads():
    assert _onednn(keep=True) == "same"


def test_a_cpu_generator_still_cannot_be_rewound_as_vllm_does_after_a_chunk_of_a_prefill():
    with pytest.raises(RuntimeError):
        torch.Generator().get_offset()
