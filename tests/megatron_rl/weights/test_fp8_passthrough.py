"""Boxes in which FP8 blocks of trainer and engine agree, against counting by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ParallelConfig
from megatron_rl.weights.fp8_passthrough import blocks_agree, cut_otherwise, rank_matrices
from megatron_rl.weights.shards import Kind, Shard
from rollout.weights.format import FP8_BLOCK
from tests.launcher.checks.test_formats import QWEN_7B, QWEN_30B_A3B


def shard(hf_start, hf_size, megatron_start, size):
    return Shard(
        hf_name="x",
        hf_full_shape=(hf_size, FP8_BLOCK),
        hf_start=(hf_start, 0),
        shape=(size, FP8_BLOCK),
        megatron_name="y",
        megatron_start=(megatron_start, 0),
        kind=Kind.LINEAR,
        replicated=False,
        owned=True,
        expert=None,
    )


def blocks(start, size, whole):
    """Rows of each block that the box touches, counted from the box's first row."""
    touched = range(start // FP8_BLOCK, -(-(start + size) // FP8_BLOCK))
    ends = [(block * FP8_BLOCK, min((block + 1) * FP8_BLOCK, whole)) for block in touched]
    return [(first - start, last - start) for first, last in ends]


steps = st.sampled_from([0, 1, 64, 127, 128, 129, 192, 256, 384])


@given(hf_start=steps, megatron_start=steps, size=steps.filter(bool), hf_more=steps, megatron_more=steps)
def test_blocks_agree_if_both_grids_cut_the_box_alike(hf_start, megatron_start, size, hf_more, megatron_more):
    hf_size, megatron_size = hf_start + size + hf_more, megatron_start + size + megatron_more
    alike = blocks(hf_start, size, hf_size) == blocks(megatron_start, size, megatron_size)
    whole = all(first >= 0 and last <= size for first, last in blocks(hf_start, size, hf_size))
    found = blocks_agree(shard(hf_start, hf_size, megatron_start, size), (megatron_size, FP8_BLOCK))
    assert found == (alike and whole)


@pytest.mark.parametrize(("spec", "tensor"), [(QWEN_7B, 1), (QWEN_7B, 4), (QWEN_30B_A3B, 1), (QWEN_30B_A3B, 2)])
def test_common_models_are_passed_through_completely(spec, tensor):
    assert cut_otherwise(spec, ParallelConfig(tensor=tensor)) == ()


def test_heads_of_64_and_uneven_ffn_sizes_have_other_blocks():
    halves = replace(QWEN_7B, head_dim=64, num_heads=56, num_kv_heads=8)
    assert cut_otherwise(halves, ParallelConfig()) == ("q_proj", "k_proj", "v_proj")
    assert cut_otherwise(replace(QWEN_7B, ffn_size=18944 + 64), ParallelConfig(tensor=1)) == ("gate_proj", "up_proj")
    uneven = cut_otherwise(replace(QWEN_7B, ffn_size=18944 + 128), ParallelConfig(tensor=2))
    assert uneven == ("gate_proj", "up_proj", "down_proj")
    assert cut_otherwise(QWEN_30B_A3B, ParallelConfig(tensor=4)) == uneven


def test_matrices_of_a_rank_are_fused_and_cut_as_in_megatron():
    held = rank_matrices(QWEN_7B, ParallelConfig(tensor=4))
    assert list(held.values()) == [
        ((28 + 8) * 128 // 4, 3584),
        (3584, 28 * 128 // 4),
        (2 * 18944 // 4, 3584),
        (3584, 4736),
    ]
    experts = rank_matrices(QWEN_30B_A3B, ParallelConfig())
    assert experts["decoder.layers.0.mlp.experts.linear_fc1.weight0"] == (2 * 768, 2048)
    assert len(experts) == 4
