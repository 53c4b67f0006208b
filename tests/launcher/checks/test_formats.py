"""8-bit formats that no engine supports are refused with the fix; formats that hardly pay cause a warning."""

from dataclasses import replace

import pytest

from launcher.checks.formats import kv_format_problems, weight_format_problems, weight_format_warnings
from launcher.cluster.node import NodeResources
from megatron_rl.model.spec import Experts, ModelSpec
from rollout.config import EngineConfig
from rollout.weights.format import WeightFormat
from tests.support.model_specs import qwen_spec

QWEN_7B = qwen_spec(
    family="qwen2",
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    head_dim=128,
    ffn_size=18944,
    vocab_size=152064,
    rope_theta=1e6,
    qkv_bias=True,
    qk_norm=False,
    max_positions=4096,
)
"""Qwen2.5-7B."""


QWEN_30B_A3B = replace(
    QWEN_7B,
    family="qwen3_moe",
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    ffn_size=768,
    qkv_bias=False,
    qk_norm=True,
    experts=Experts(count=128, per_token=8, ffn_size=768, normalised=True),
)

CPU = NodeResources(cpu_cores=2, available_bytes=1 << 34, gpu_bytes=())
GPU = replace(CPU, gpu_bytes=(80 << 30,))


def problems(spec: ModelSpec = QWEN_7B, node: NodeResources = GPU, **keys: object) -> list[str]:
    engine = EngineConfig.model_validate(keys)
    return weight_format_problems(spec, WeightFormat.of(engine), node, tensor_parallel=engine.tensor_parallel)


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8_channel", "fp8_block"])
def test_a_common_model_is_accepted_in_every_format(format: str) -> None:
    assert problems(format=format, tensor_parallel=4) == []


def test_blocks_shared_by_two_ranks_are_refused_naming_tensor_and_ranks() -> None:
    spec = replace(QWEN_7B, num_heads=32, num_kv_heads=8, ffn_size=18944 - 256)
    (found,) = [one for one in problems(spec, format="fp8_block", tensor_parallel=8) if "down_proj" in one]
    assert "`engine.tensor_parallel` = 8" in found and "2336 columns of model.layers.1.mlp.down_proj.weight" in found
    assert problems(spec, format="fp8_channel", tensor_parallel=8) == []


def test_on_one_rank_only_the_last_of_fused_matrices_may_end_within_a_block() -> None:
    small = replace(QWEN_7B, num_heads=2, num_kv_heads=1, head_dim=64, ffn_size=200)
    found = problems(small, format="fp8_block")
    assert ["k_proj" in one or "gate_proj" in one for one in found] == [True, True]


def test_exceptions_that_leave_no_8_bit_matrix_are_refused() -> None:
    (found,) = problems(replace(QWEN_7B, num_layers=2), format="int8")
    assert "1 + 1 leave none of the model's 2 layers" in found
    assert problems(replace(QWEN_7B, num_layers=2), format="bf16") == []


def test_an_exception_for_a_part_of_a_fused_matrix_is_refused() -> None:
    (found,) = problems(format="int8", bf16_modules=("*.q_proj",))
    assert "excepts q_proj of model.layers.1.self_attn" in found
    assert problems(format="int8", bf16_modules=("*.q_proj", "*.k_proj", "*.v_proj", "*.down_proj")) == []


def test_experts_are_excepted_together_and_need_whole_blocks() -> None:
    for format in ("int8", "fp8_channel", "fp8_block"):
        assert problems(QWEN_30B_A3B, format=format, tensor_parallel=2) == []
        (found,) = problems(QWEN_30B_A3B, CPU, format=format)
        assert "has 128 experts" in found and "on GPUs only; set it to bf16" in found
    assert problems(QWEN_30B_A3B, CPU, format="bf16") == []
    (found,) = problems(QWEN_30B_A3B, format="int8", bf16_modules=("*.experts.down_proj",))
    assert (
        "excepts down_proj of model.layers.1.mlp.experts, but vLLM fuses gate_proj, up_proj, down_proj into one"
        in found
    )
    assert problems(QWEN_30B_A3B, format="int8", bf16_modules=("*.experts.*",)) == []
    found = problems(QWEN_30B_A3B, format="fp8_block", tensor_parallel=4)
    assert any("192 rows of model.layers.1.mlp.experts.gate_proj.weight" in one for one in found)
    assert any("192 columns of model.layers.1.mlp.experts.down_proj.weight" in one for one in found)


def test_a_name_that_matches_no_matrix_is_refused_naming_the_nearest() -> None:
    (found,) = problems(format="int8", bf16_modules=("*.down_prj",))
    assert "'*.down_prj'" in found and "did you mean '*.down_proj'" in found


@pytest.mark.parametrize(
    ("format", "capability", "fix"),
    [
        ("fp8_channel", (8, 0), "FP8 needs 8.9; set it to int8"),
        ("fp8_block", (8, 6), "FP8 needs 8.9; set it to int8"),
        ("int8", (10, 0), "vLLM's INT8 kernels end before 10.0; set it to fp8_channel"),
        ("int8", (12, 0), "vLLM's INT8 kernels end before 10.0; set it to fp8_channel"),
    ],
)
def test_a_format_without_products_on_the_gpu_is_refused_with_its_capability(
    format: str, capability: tuple[int, int], fix: str
) -> None:
    (found,) = problems(node=replace(GPU, gpu_capability=capability), format=format)
    assert found.startswith(f"`engine.format` = {format}: this node's GPU has compute capability ")
    assert f"capability {capability[0]}.{capability[1]}, and {fix}" in found
    assert problems(node=replace(GPU, gpu_capability=capability), format="bf16") == []


def test_a_format_is_accepted_by_every_gpu_that_multiplies_in_it() -> None:
    for format, capabilities in {"int8": [(8, 0), (9, 0)], "fp8_block": [(8, 9), (9, 0), (10, 0)]}.items():
        for capability in (*capabilities, None):
            assert problems(node=replace(GPU, gpu_capability=capability), format=format) == []


def test_small_models_on_gpus_and_emulation_on_cpus_cause_a_warning() -> None:
    def warnings(format: str, node: NodeResources, spec: ModelSpec = QWEN_7B) -> list[str]:
        return weight_format_warnings(spec, WeightFormat.of(EngineConfig.model_validate({"format": format})), node)

    assert "7.6 billion" in warnings("int8", GPU)[0]
    assert warnings("int8", GPU, replace(QWEN_7B, num_layers=64)) == []
    assert "emulated" in warnings("fp8_block", CPU)[0]
    assert warnings("int8", CPU) == warnings("bf16", GPU) == []


def test_fp8_keys_and_values_are_refused_where_attention_cannot_compute_with_them() -> None:
    narrow = replace(QWEN_7B, head_dim=80)
    for node, spec in ((CPU, QWEN_7B), (GPU, narrow), (replace(GPU, gpu_capability=(8, 9)), narrow)):
        assert kv_format_problems(spec, "fp8", node) == []
    refused = {
        "heads of the model have size 80, and vLLM needs a multiple of 32 on a CPU": (CPU, narrow),
        "this node's CPU has no AVX-512": (replace(CPU, has_avx512=False), QWEN_7B),
        "compute capability 8.0, and FP8 needs 8.9": (replace(GPU, gpu_capability=(8, 0)), QWEN_7B),
    }
    for reason, (node, spec) in refused.items():
        (found,) = kv_format_problems(spec, "fp8", node)
        assert found.startswith("`engine.kv_format` = fp8: ") and reason in found and found.endswith("set it to bf16")
        assert kv_format_problems(spec, "bf16", node) == []
