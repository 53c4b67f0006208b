"""A plan tiles every tensor once, sends nothing twice, and keeps the order of the model, for any partition."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import ParallelConfig
from megatron_rl.weights.reshard_plan import Role, plan_reshard, wire_tensors
from rollout.types import WeightVersion
from rollout.weights.format import WeightFormat
from rollout.weights.manifest import DTYPE_BYTES, TRAILER, Box
from tests.support.model_specs import qwen_spec

INT8 = WeightFormat(name="int8")
SPEC = qwen_spec()

specs = st.builds(
    dataclasses.replace,
    st.just(SPEC),
    num_layers=st.integers(2, 5),
    vocab_size=st.integers(10, 300),
    tied=st.booleans(),
    qkv_bias=st.booleans(),
    qk_norm=st.booleans(),
)
partitions = st.builds(
    ParallelConfig, tensor=st.sampled_from([1, 2, 4]), pipeline=st.sampled_from([1, 2]), data=st.sampled_from([1, 2])
)


@settings(deadline=None, max_examples=60)
@given(
    spec=specs,
    parallel=partitions,
    name=st.sampled_from(["bf16", "int8", "fp8_channel", "fp8_block"]),
    kept=st.integers(0, 1),
    bucket_bytes=st.integers(200, 40_000),
)
def test_every_plan_keeps_the_invariants_of_its_docstring(spec, parallel, name, kept, bucket_bytes):
    format = WeightFormat(name=name, bf16_first_layers=kept)
    plan = plan_reshard(spec, parallel, format=format, bucket_bytes=bucket_bytes, uses_te_layer_names=False)
    plan.manifest("r", WeightVersion(0)).check()
    for bucket, planned in zip(plan.buckets, plan.pieces, strict=True):
        assert [(p.tensor, p.box) for p in bucket.pieces] == [(p.tensor, p.box) for p in planned]
        assert bucket.num_bytes <= max(bucket_bytes, 64) or len(bucket.pieces) == 1
        assert bucket.source_rank < parallel.world_size
        tensors = [piece.tensor for piece in bucket.pieces]
        assert tensors == sorted(tensors)
    firsts = [bucket.pieces[0].tensor for bucket in plan.buckets]
    assert firsts == sorted(firsts)
    for rank in plan.source_ranks:
        sent = [piece.tensor for bucket in plan.buckets_of(rank) for piece in bucket.pieces]
        assert sent == sorted(sent)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_quantised_tensors_take_about_half_the_bytes_of_bf16_in_int8(tensor):
    def linear_bytes(format):
        tensors = wire_tensors(SPEC, WeightFormat(name=format))
        return sum(t.num_bytes for t in tensors if ".layers." in t.name and len(t.shape) == 2)

    scales = sum(t.num_bytes for t in wire_tensors(SPEC, INT8) if t.name.endswith("_scale"))
    assert linear_bytes("int8") - scales == linear_bytes("bf16") / 2
    plan = plan_reshard(
        SPEC, ParallelConfig(tensor=tensor), format=INT8, bucket_bytes=1 << 20, uses_te_layer_names=False
    )
    payload = sum(t.num_bytes for t in plan.tensors)
    padding = plan.manifest("r", WeightVersion(0)).num_bytes - payload - len(plan.buckets) * TRAILER.size
    assert 0 <= padding < 64 * sum(len(bucket.pieces) for bucket in plan.buckets)


def test_data_parallel_replicas_share_the_sending():
    plan = plan_reshard(
        SPEC, ParallelConfig(tensor=2, data=4), format=INT8, bucket_bytes=1000, uses_te_layer_names=False
    )
    plan.manifest("r", WeightVersion(0)).check()
    assert plan.source_ranks == tuple(range(8))
    sent = [sum(bucket.num_bytes for bucket in plan.buckets_of(rank)) for rank in range(8)]
    for replicas in (sent[0::2], sent[1::2]):
        assert max(replicas) - min(replicas) <= max(bucket.num_bytes for bucket in plan.buckets)
    for bucket, pieces in zip(plan.buckets, plan.pieces, strict=True):  # each rank sends boxes that it holds
        start = {piece.shard.hf_start for piece in pieces if piece.shard.hf_name.endswith("q_proj.weight")}
        assert all((first[0] >= 32) == bool(bucket.source_rank % 2) for first in start)


def test_a_rank_of_a_row_parallel_matrix_sends_its_columns_and_only_the_first_sends_scales():
    plan = plan_reshard(SPEC, ParallelConfig(tensor=2), format=INT8, bucket_bytes=1 << 20, uses_te_layer_names=False)
    name = "model.layers.0.mlp.down_proj.weight"
    found = [
        (bucket.source_rank, piece.role, piece.box.start, piece.box.shape)
        for bucket, pieces in zip(plan.buckets, plan.pieces, strict=True)
        for piece in pieces
        if piece.shard.hf_name == name
    ]
    assert found == [
        (0, Role.CODES, (0, 0), (32, 24)),
        (0, Role.SCALES, (0, 0), (32, 1)),
        (1, Role.CODES, (0, 24), (32, 24)),
    ]


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ValueError, match="no format 'int4'"):
        WeightFormat(name="int4")
    assert set(DTYPE_BYTES) >= {t.dtype for t in wire_tensors(SPEC, INT8)}


def shards(spec, format, num_ranks: int) -> list[dict[str, tuple[Box, ...]]]:
    """Boxes that ranks of a tensor-parallel engine require: rows or columns by name, other tensors whole."""
    found: list[dict[str, tuple[Box, ...]]] = [{} for _ in range(num_ranks)]
    for tensor in wire_tensors(spec, format):
        dim = 1 if "o_proj" in tensor.name or "down_proj" in tensor.name else 0
        cut = len(tensor.shape) == 2 and tensor.shape[dim] % num_ranks == 0
        size = tensor.shape[dim] // num_ranks if cut else 0
        for rank, boxes in enumerate(found):
            start, shape = [0] * len(tensor.shape), list(tensor.shape)
            if cut:
                start[dim], shape[dim] = rank * size, size
            boxes[tensor.name] = (Box(start=tuple(start), shape=tuple(shape)),)
    return found


@settings(deadline=None, max_examples=60)
@given(
    spec=specs,
    parallel=partitions,
    name=st.sampled_from(["bf16", "int8", "fp8_block"]),
    num_ranks=st.sampled_from([1, 2, 4]),
    bucket_bytes=st.integers(200, 40_000),
)
def test_each_engine_rank_gets_its_required_boxes_and_little_else(spec, parallel, name, num_ranks, bucket_bytes):
    format = WeightFormat(name=name)
    required = shards(spec, format, num_ranks)
    plan = plan_reshard(
        spec, parallel, format=format, bucket_bytes=bucket_bytes, uses_te_layer_names=False, required=required
    )
    manifest = plan.manifest("r", WeightVersion(0))
    manifest.check()
    for rank, boxes in enumerate(required):
        manifest.check_required(rank, boxes)
        sent = sum(piece.box.size for bucket in plan.buckets if bucket.required_by(rank) for piece in bucket.pieces)
        assert sent == sum(box.size for own in boxes.values() for box in own)


def test_tensors_that_no_engine_requires_are_sent_too_so_that_a_publish_is_complete():
    required = [{tensor.name: () for tensor in wire_tensors(SPEC, INT8)}]
    plan = plan_reshard(
        SPEC, ParallelConfig(), format=INT8, bucket_bytes=1 << 20, uses_te_layer_names=False, required=required
    )
    plan.manifest("r", WeightVersion(0)).check()
    assert {bucket.engine_ranks for bucket in plan.buckets} == {(0,)}


def test_a_large_model_on_many_ranks_is_sent_completely():
    spec = dataclasses.replace(
        SPEC, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=29568
    )
    required = shards(spec, INT8, 8)
    width = {tensor.name: DTYPE_BYTES[tensor.dtype] for tensor in wire_tensors(spec, INT8)}
    plan = plan_reshard(
        spec,
        ParallelConfig(tensor=8, pipeline=8, data=8),
        format=INT8,
        bucket_bytes=256 << 20,
        uses_te_layer_names=True,
        required=required,
    )
    assert 64 < len(plan.source_ranks) <= 512  # replicas have a part where there are buckets enough
    sent = [sum(bucket.num_bytes for bucket in plan.buckets if bucket.required_by(rank)) for rank in range(8)]
    own = [sum(box.size * width[name] for name, (box,) in boxes.items()) for boxes in required]
    assert all(got <= 1.02 * needed for got, needed in zip(sent, own, strict=True))
