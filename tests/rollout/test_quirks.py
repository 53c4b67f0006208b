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
import vllm.v1.worker.cpu_worker
from vllm import _custom_ops as ops
from rollout import vllm_quirks

def what_changes_when_the_scales_do():
    torch.manual_seed(0)
    weight = torch.randint(-99, 99, (64, 32), dtype=torch.int8)
    scales = torch.rand(32, 1) + 0.5
    handler = ops.create_onednn_scaled_mm(weight.t().contiguous().t(), scales, torch.bfloat16, True, False, 32)
    codes, x_scales, _ = ops.onednn_scaled_int8_quant(torch.randn(4, 64, dtype=torch.bfloat16), None, None, True)
    outputs = [torch.empty(4, 32, dtype=torch.bfloat16) for _ in range(2)]
    ops.onednn_scaled_mm(handler, codes, outputs[0], x_scales, None, None, None)
    scales.zero_()
    ops.onednn_scaled_mm(handler, codes, outputs[1], x_scales, None, None, None)
    return "nothing" if torch.equal(*outputs) else "result"

print(what_changes_when_the_scales_do())
vllm_quirks.int8_logits_are_uniform_after_reload()
print(what_changes_when_the_scales_do())
"""


def test_onednn_still_reads_scales_that_it_does_not_own_unless_it_is_given_a_copy():
    environment = os.environ | ProcessEnv(single_node=True).engine(threads=1) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ONEDNN_READS_SCALES_LATER]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split()[-2:] == ["result", "nothing"], done.stderr[-2000:]


def test_a_cpu_generator_still_cannot_be_rewound_as_vllm_does_after_a_chunk_of_a_prefill():
    with pytest.raises(RuntimeError):
        torch.Generator().get_offset()
