"""An engine with pushed weights computes exactly the same as vLLM with the same weights loaded from a directory."""

import numpy as np
import pytest

from megatron_rl.controller.publisher import MAX_WEIGHT_GAP
from rollout.config import EngineConfig


def gap(found: list, expected: list) -> float:
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("qwen3", "bf16"),
        ("qwen3", "int8"),
        ("qwen2", "bf16"),
        ("qwen2", "int8"),
        ("llama", "int8"),
        ("qwen2", "fp8_channel"),
        ("blocks", "fp8_block"),
        ("experts", "bf16"),
    ],
)
def test_pushed_weights_compute_the_same_as_a_loaded_directory_through_a_b_a(oracle, family, format):
    pushed = oracle.answers[f"push-{family}-ABA-{format}"]
    for weights, answer in zip("ABA", pushed, strict=True):
        expected = oracle.fresh(family, weights, format)
        assert answer["tokens"] == expected["tokens"]
        assert gap(answer["logprobs"], expected["logprobs"]) == 0
        assert gap([answer["probe"]], [expected["probe"]]) == 0


def test_a_probe_leaves_cached_keys_and_values_of_requests_unchanged(oracle):
    pushed = [one for name, answers in oracle.answers.items() if name.startswith("push") for one in answers]
    assert pushed and all(one["blocks_changed_by_probe"] == 0 for one in pushed)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_checkpoints_a_and_b_give_different_answers(oracle, family):
    a, b = oracle.fresh(family, "A", "int8"), oracle.fresh(family, "B", "int8")
    assert gap([a["probe"]], [b["probe"]]) > 0.5


def test_fingerprints_tell_experts_and_their_matrices_apart(oracle):
    for pushed in oracle.answers["push-experts-ABA-bf16"]:
        found = pushed["sum_gaps"]
        # by how much depends on the CPU's kernel: an expert rounds to BF16 two or three times
        assert found.pop("as meant")[0] < MAX_WEIGHT_GAP
        assert set(found) == {"two experts exchanged", "gate and up exchanged", "one expert stale"}
        for fault, (size, where) in found.items():
            assert size > 3 * MAX_WEIGHT_GAP, fault
            assert "model.layers.1.mlp.experts." in where, fault
            assert any(f".experts.{one}." in where for one in ("12" if fault.startswith("two") else "1")), fault


def test_int8_differs_slightly_from_bf16(oracle):
    exact, quantised = oracle.fresh("qwen3", "A", "bf16"), oracle.fresh("qwen3", "A", "int8")
    difference = np.abs(np.subtract(exact["probe"], quantised["probe"])).mean()
    assert 0 < difference < 0.2


def test_int8_linears_are_multiplied_by_an_int8_kernel(oracle):
    kernels = dict(oracle.answers["push-qwen3-ABA-int8"][0]["kernels"])
    layers = {name: kernel for name, kernel in kernels.items() if ".layers." in name}
    assert len(layers) == 8
    assert all("Int8" in kernel for kernel in layers.values())
    assert "Int8" not in kernels["lm_head"]


@pytest.mark.parametrize(
    ("job", "kernel"),
    [("push-qwen2-ABA-fp8_channel", "EmulatedFp8Channel"), ("push-blocks-ABA-fp8_block", "EmulatedFp8Block")],
)
def test_fp8_on_a_cpu_reports_that_it_is_emulated(oracle, job, kernel):
    kernels = dict(oracle.answers[job][0]["kernels"])
    assert {found for name, found in kernels.items() if ".layers." in name} == {kernel}


def test_bf16_linears_are_not_quantised(oracle):
    kernels = dict(oracle.answers["push-qwen3-ABA-bf16"][0]["kernels"])
    assert not any("Int8" in kernel for kernel in kernels.values())


def test_an_engine_with_another_rotary_embedding_fails_the_probe_despite_right_weights(oracle):
    found, expected = oracle.answers["push-into-another-rope"][1]["probe"], oracle.fresh("qwen3", "A", "bf16")["probe"]
    bound = EngineConfig().probe_max_logprob_gap["bf16"] * max(1.0, float(np.std(expected)))
    assert np.abs(np.subtract(found, expected)).mean() > 2 * bound


@pytest.mark.parametrize("family", ["blocks", "experts"])
def test_two_ranks_answer_alike_with_pushed_and_with_loaded_weights(parallel_formats, family):
    found = parallel_formats[family]
    assert found["sent"]["tokens"] == found["loaded"]["tokens"]
    assert gap(found["sent"]["logprobs"], found["loaded"]["logprobs"]) < 1e-6
    assert gap([found["sent"]["probe"]], [found["loaded"]["probe"]]) < 1e-6
    first, second = found["required"]
    assert first == second  # halves, and tensors that both ranks hold
