"""Each workaround is still needed. If a test here fails, upstream has fixed the fault: remove the workaround."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm_cpu
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.sample import rejection_sampler

from rollout.cpu import quirks
from rollout.processes import ProcessEnv
from rollout.worker import vllm_quirks
from tests.rollout.worker.test_publish import gap
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT


def test_onednn_int8_is_right_after_every_reload(oracle):
    for weights, answer in zip("ABA", oracle.answers["push-qwen3-ABA-int8-onednn"], strict=True):
        expected = oracle.fresh("qwen3", weights, "int8", onednn=True)
        assert answer["tokens"] == expected["tokens"]
        assert gap(answer["logprobs"], expected["logprobs"]) == 0
        assert "onednn" in dict(answer["kernels"])["model.layers.0.mlp.down_proj"]


def test_vllm_still_gives_its_int8_kernel_matrices_that_it_cannot_pack(monkeypatch):
    current_platform.import_kernels()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(scaled_mm_cpu, "check_cpu_sgl_kernel", layer_utils.check_cpu_sgl_kernel)
    assert scaled_mm_cpu.check_cpu_sgl_kernel(48, 64, torch.int8)
    for _ in range(2):  # a process may start more than one engine
        quirks.int8_kernel_refuses_rows_that_vllm_offers_it()
    assert not scaled_mm_cpu.check_cpu_sgl_kernel(48, 64, torch.int8)
    assert scaled_mm_cpu.check_cpu_sgl_kernel(64, 64, torch.int8)
    assert scaled_mm_cpu.check_cpu_sgl_kernel(48, 64, torch.bfloat16)


def test_packing_still_refuses_a_part_of_a_block_or_this_cpu_never_packs():
    current_platform.import_kernels()
    pack = getattr(torch.ops._C, "convert_weight_packed", None)
    if pack is None:  # builds for CPUs without AVX-512 BF16 lack it
        assert not layer_utils.check_cpu_sgl_kernel(48, 64, torch.int8), "vLLM chooses a kernel that cannot pack"
    else:
        with pytest.raises(RuntimeError, match="BLOCK_N"):
            pack(torch.ones(48, 64, dtype=torch.int8))


def test_a_tied_head_is_still_stale_after_a_reload_without_the_workaround(oracle):
    name = "push-qwen2-AB-bf16-without_quirk"
    answer, expected = oracle.answers[name][1], oracle.fresh("qwen2", "B", "bf16")
    gap = np.abs(np.subtract(answer["probe"], expected["probe"])).mean()
    assert gap > 0.5 if bf16_products_use_a_copy_of_the_weights() else gap == 0


def bf16_products_use_a_copy_of_the_weights() -> bool:
    """Whether the BF16 kernel of this CPU packs weights when they are loaded; on AVX2 it reads them where they are."""
    layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16), requires_grad=False)
    layer.quant_method = UnquantizedEmbeddingMethod()
    layer.quant_method.process_weights_after_loading(layer)
    if not hasattr(layer, "cpu_linear"):
        return False
    layer.weight.data.zero_()
    return bool(layer.cpu_linear(torch.ones(1, 64, dtype=torch.bfloat16), layer.weight, None).any())


def test_experts_still_multiply_by_unpacked_weights_after_a_reload_without_the_workaround(oracle):
    name = "push-experts-AB-bf16-without_quirk"
    answer, expected = oracle.answers[name][1], oracle.fresh("experts", "B", "bf16")
    assert np.abs(np.subtract(answer["probe"], expected["probe"])).mean() > 0.2


def test_an_untied_embedding_is_still_packed_for_products_that_never_happen():
    embedding = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(embedding)
    embedding.weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16), requires_grad=False)
    embedding.quant_method = UnquantizedEmbeddingMethod()
    embedding.quant_method.process_weights_after_loading(embedding)
    assert hasattr(embedding, "cpu_linear")
    model = torch.nn.Module()
    model.lm_head = embedding  # tied: here it is multiplied by
    quirks.embedding_is_held_twice(model)
    assert hasattr(embedding, "cpu_linear")
    model.lm_head, model.embed_tokens = torch.nn.Linear(2, 2), embedding
    quirks.embedding_is_held_twice(model)
    embedding.quant_method.process_weights_after_loading(embedding)
    assert not hasattr(embedding, "cpu_linear")


def test_an_embedding_that_is_quantised_keeps_its_method():
    embedding = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(embedding)
    embedding.quant_method = method = object()
    model = torch.nn.Module()
    model.lm_head, model.embed_tokens = torch.nn.Linear(2, 2), embedding
    quirks.embedding_is_held_twice(model)
    assert embedding.quant_method is method


def test_an_output_layer_still_keeps_its_packed_copy_through_a_reload_without_the_workaround():
    def embedding() -> VocabParallelEmbedding:
        layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
        torch.nn.Module.__init__(layer)
        layer.weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16), requires_grad=False)
        layer.quant_method = UnquantizedEmbeddingMethod()
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    model = torch.nn.Module()
    model.lm_head, model.model = embedding(), torch.nn.Module()
    model.model.embed_tokens = embedding()
    layerwise.record_metadata_for_reloading(model)
    layerwise.initialize_layerwise_reload(model)
    assert hasattr(model.lm_head, "cpu_linear")
    quirks.output_layer_is_packed_beside_its_old_copy(model)
    assert not hasattr(model.lm_head, "cpu_linear")
    model.lm_head = embedding()
    model.model.embed_tokens.weight = model.lm_head.weight  # tied: nothing is loaded into it
    quirks.output_layer_is_packed_beside_its_old_copy(model)
    assert hasattr(model.lm_head, "cpu_linear")


def test_a_waiting_call_raises_when_the_engine_dies():
    dead = SimpleNamespace(engine_dead=False)

    async def never(method: str) -> str:
        if method == "answered":
            return "answer"
        dead.engine_dead = True
        await asyncio.sleep(100)
        return ""

    client = SimpleNamespace(resources=dead, call_utility_async=never)
    vllm_quirks.calls_wait_forever_for_a_dead_engine(client)
    assert asyncio.run(client.call_utility_async("answered")) == "answer"
    with pytest.raises(EngineDeadError):
        asyncio.run(asyncio.wait_for(client.call_utility_async("unanswered"), DEADLINE_S))


ONEDNN_READS_SCALES_LATER = """
import torch
import vllm.v1.worker.cpu_worker
from vllm import _custom_ops as ops
from rollout.cpu import quirks

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
quirks.int8_logits_are_uniform_after_reload()
print(what_changes_when_the_scales_do())
"""


@pytest.mark.slow
def test_onednn_still_reads_freed_scales_unless_it_gets_a_copy():
    environment = os.environ | ProcessEnv(single_node=True).engine(threads=1) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ONEDNN_READS_SCALES_LATER]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.stdout.split()[-2:] == ["result", "nothing"], done.stderr[-2000:]


def test_a_cpu_generator_still_cannot_be_rewound_after_a_prefill_chunk():
    with pytest.raises(RuntimeError):
        torch.Generator().get_offset()


@pytest.fixture
def sampler(monkeypatch):
    """vLLM's rejection sampler with its CPU replacements, as in an engine's process."""
    current_platform.import_kernels()

    def sample(*arguments):
        *first, synthetic = arguments
        vocabulary = first[4].shape[1]
        cpu_triton_utils._rejection_random_sample_kernel_impl(*first, vocabulary, synthetic, first[3] is None, False)

    sample.register_warmup = rejection_sampler._rejection_random_sample.register_warmup
    for kernel in ("expand_kernel", "rejection_random_sample_kernel"):
        stand_in = SimpleNamespace(func=getattr(cpu_triton_utils, f"_{kernel}_impl"))
        monkeypatch.setattr(rejection_sampler, kernel, stand_in)
    monkeypatch.setattr(rejection_sampler, "_rejection_random_sample", sample)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    return rejection_sampler


@pytest.fixture
def patched_sampler(sampler):
    for _ in range(2):  # a process may start more than one engine
        quirks.drafted_rows_are_sampled_at_a_random_temperature()
        quirks.padding_of_a_draft_is_accepted()
    return sampler


def test_temperatures_are_still_not_expanded_over_the_tokens_of_a_draft():
    output = torch.full((3,), torch.nan)
    ends = torch.tensor([2, 3], dtype=torch.int32)
    cpu_triton_utils._expand_kernel_impl(output, torch.tensor([0.7, 1.0]), ends, 0, 1)
    assert output.isnan().all()


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.int32, torch.int64]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_value_per_request_is_expanded_over_its_tokens(patched_sampler, counts, dtype):
    values = torch.arange(len(counts)).to(dtype)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    found = patched_sampler.expand_batch_to_tokens(values, ends, sum(counts), replace_from=0, replace_to=9)
    assert found.dtype is dtype
    assert found.tolist() == [row or 9 for row, count in enumerate(counts) for _ in range(count)]


def rejection_of_padding(sampler) -> list[int]:
    """Outcome of a row whose only draft is padding, behind a row whose last token is certain."""
    output = torch.full((2, 2), -1, dtype=torch.int32)
    sampler._rejection_random_sample(
        output,
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([3, -1], dtype=torch.int32),
        None,
        torch.tensor([[0.0, 0, 0, 1], [0.25, 0.25, 0.25, 0.25]]),
        torch.tensor([[0], [1]], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.full((2,), 0.5, dtype=torch.float64),
        torch.tensor([False, False]),
        1,
        None,
    )
    assert output[0].tolist() == [3, 0]
    return output[1].tolist()


def test_draft_padding_is_still_accepted_without_the_workaround(sampler):
    assert rejection_of_padding(sampler) == [-1, 1]


def test_draft_padding_is_rejected_with_the_workaround(patched_sampler):
    assert rejection_of_padding(patched_sampler) == [2, -1]


def test_the_workaround_leaves_other_kernels_alone(sampler, monkeypatch):
    monkeypatch.setattr(rejection_sampler, "expand_kernel", SimpleNamespace(func=print))
    monkeypatch.setattr(rejection_sampler, "rejection_random_sample_kernel", SimpleNamespace(func=print))
    before = sampler.expand_batch_to_tokens, sampler._rejection_random_sample
    quirks.drafted_rows_are_sampled_at_a_random_temperature()
    quirks.padding_of_a_draft_is_accepted()
    assert (sampler.expand_batch_to_tokens, sampler._rejection_random_sample) == before


def kernel_with_strides() -> SimpleNamespace:
    """As Cutlass's kernel of four experts in FP8: attributes of a part of it are strides; one tensor is two of them."""
    rows, columns = torch.full((4,), 128), torch.full((4,), 256)
    scratch = torch.zeros(8)
    experts = SimpleNamespace(ab_strides1=rows, c_strides2=rows, c_strides1=columns, scratch=scratch, out_dtype=None)
    return SimpleNamespace(impl=SimpleNamespace(fused_experts=experts))


class ExpertsThatBuildAKernelWhenRepacked(FusedMoEMethodBase):
    """As vLLM's methods of experts in 8 bits do."""

    def __init__(self) -> None:
        self.moe_kernel, self.moe_quant_config = kernel_with_strides(), object()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.num_repacked += 1
        self.moe_kernel, self.moe_quant_config = kernel_with_strides(), object()


ExpertsThatBuildAKernelWhenRepacked.__abstractmethods__ = frozenset()  # nothing here multiplies


def model_with_experts() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].num_repacked, model[0].quant_method = 0, ExpertsThatBuildAKernelWhenRepacked()
    return model


def test_strides_of_experts_are_right_again_after_their_memory_was_discarded():
    model = model_with_experts()
    method = model[0].quant_method
    experts = method.moe_kernel.impl.fused_experts
    captured = experts.ab_strides1, experts.c_strides1
    experts.scratch = torch.zeros(16)  # a forward has made a larger one
    for _ in range(2):
        vllm_quirks.graphs_of_experts_read_freed_strides_after_reload(model)
        for tensor in (*captured, experts.scratch):
            tensor.fill_(-1)
        method.process_weights_after_loading(model[0])
        assert [tensor.tolist() for tensor in captured] == [[128] * 4, [256] * 4]
        assert experts.ab_strides1 is experts.c_strides2 is captured[0] and experts.c_strides1 is captured[1]
        assert experts.scratch.tolist() == [-1] * 16
    assert method.moe_kernel.impl.fused_experts is experts


def test_kernels_of_experts_outlive_every_reload():
    model = model_with_experts()
    layer = model[0]
    captured = layer.quant_method.moe_kernel, layer.quant_method.moe_quant_config
    for _ in range(3):
        vllm_quirks.graphs_of_experts_read_freed_strides_after_reload(model)
        layer.quant_method.process_weights_after_loading(layer)
        assert (layer.quant_method.moe_kernel, layer.quant_method.moe_quant_config) == captured
    assert layer.num_repacked == 3
