"""Any trainer of 64 ranks to any engines of 64 ranks: received parts equal slices of the whole quantised model.

The real plan, packers and received; a transport that is a dictionary, and a collective that is a barrier of threads.
"""

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import Experts, ModelSpec
from megatron_rl.quantization.backends import Quantizer, TorchBackend
from megatron_rl.quantization.formats import CODE_FORMATS
from megatron_rl.ranks import trainer_ranks
from megatron_rl.weights import packer as packer_module
from megatron_rl.weights.fp8_passthrough import parameter_shapes
from megatron_rl.weights.packer import WeightPacker
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard, wire_tensors
from megatron_rl.weights.shards import hf_shapes, rank_shards
from rollout.types import WeightVersion
from rollout.weights.format import WeightFormat
from rollout.weights.manifest import Box, Required
from rollout.worker.received_pieces import ReceivedPieces
from tests.megatron_rl.weights.test_reshard_plan import SPEC as SMALL
from tests.support.deadline import DEADLINE_S
from tests.support.trainers.memory_sender import MemorySender

WORLD = 64
SPEC = dataclasses.replace(
    SMALL, num_layers=2, hidden_size=96, num_heads=16, num_kv_heads=8, ffn_size=144, vocab_size=203
)


class Meeting:
    """A max all-reduce over threads: each thread gives a tensor and gets the elementwise maximum."""

    def __init__(self, size: int) -> None:
        self.brought: list[torch.Tensor] = []
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=DEADLINE_S)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        with self.lock:
            self.brought.append(tensor.clone())
        self.barrier.wait()
        tensor.copy_(torch.stack(self.brought).amax(0))
        if self.barrier.wait() == 0:
            self.brought = []
        self.barrier.wait()


def whole_model(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = hf_shapes(spec)
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


def quantised_whole(plan: ReshardPlan, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor of a publish, quantised by the format's rule from whole matrices."""
    format, layout = CODE_FORMATS.get(plan.format.name), plan.format.layout
    rule = None if format is None else Quantizer(format=format, backend=TorchBackend())
    found = {}
    for spec in plan.tensors:
        if layout is not None and spec.name.endswith(layout.scale_suffix):
            continue
        parts = [[whole[name]] for name in spec.unstacked]
        if rule is not None and layout is not None and spec.dtype == layout.dtype:
            factors = [rule.factors(rule.amax(matrix, (0, 0))) for (matrix,) in parts]
            parts = [
                [rule.codes(matrix, factor, (0, 0)), rule.scales(factor)]
                for (matrix,), factor in zip(parts, factors, strict=True)
            ]
        for suffix, tensors in zip(("", layout and layout.scale_suffix), zip(*parts, strict=True), strict=False):
            found[spec.name + suffix] = torch.stack(tensors) if spec.is_stack else tensors[0]
    return found


def parameters_of(held, whole: dict[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    """Parameters of a rank with these shards."""
    parameters = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in parameter_shapes(held).items()}
    for one in held:
        parameters[one.megatron_name][one.megatron_slices] = whole[one.hf_name][one.hf_slices]
    return {name: torch.nn.Parameter(value, requires_grad=False) for name, value in parameters.items()}


def shares(spec: ModelSpec, format: WeightFormat, num_ranks: int, seed: int) -> list[Required]:
    """Boxes that an engine's ranks require: each tensor cut by rows or columns at random positions, or required by all.

    In a stack, every expert's matrix is cut alike, or whole experts are distributed.
    """
    random = torch.Generator().manual_seed(seed)
    found: list[dict[str, tuple[Box, ...]]] = [{} for _ in range(num_ranks)]
    for tensor in wire_tensors(spec, format):
        dim = int(torch.randint(len(tensor.shape) + 1, (1,), generator=random))
        if dim == len(tensor.shape):
            cuts = [Box(start=(0,) * len(tensor.shape), shape=tensor.shape)] * num_ranks
        else:
            size = tensor.shape[dim]
            ends = [0, *sorted(torch.randint(size + 1, (num_ranks - 1,), generator=random).tolist()), size]
            cuts = []
            for first, end in pairwise(ends):
                start, shape = [0] * len(tensor.shape), list(tensor.shape)
                start[dim], shape[dim] = first, end - first
                cuts.append(Box(start=tuple(start), shape=tuple(shape)))
        for boxes, box in zip(found, cuts, strict=True):
            boxes[tensor.name] = tuple(_of_single_experts(box)) if box.size else ()
    return found


def _of_single_experts(box: Box) -> Iterator[Box]:
    if len(box.start) < 3:
        yield box
        return
    for expert in range(box.start[0], box.start[0] + box.shape[0]):
        yield Box(start=(expert, *box.start[1:]), shape=(1, *box.shape[1:]))


def assembled(received: ReceivedPieces, name: str, box: Box) -> torch.Tensor:
    """A part as a loader gets it: a vector as a whole, a matrix piece by piece."""
    if len(box.shape) < 2:
        return received.read(name, box)
    found: torch.Tensor | None = None
    for common, piece in received.views(name, box):
        found = piece.new_empty(box.shape) if found is None else found
        found[common.slices(box.start)] = piece
    assert found is not None
    return found


layouts = st.sampled_from([(t, p, WORLD // t // p) for t in (1, 2, 4, 8) for p in (1, 2, 8)])


@pytest.fixture
def meetings(monkeypatch):
    """Process groups are `Meeting`s during this test."""
    stand_in = SimpleNamespace(
        all_reduce=lambda tensor, op, group: group.all_reduce(tensor), ReduceOp=SimpleNamespace(MAX="max")
    )
    monkeypatch.setattr(packer_module, "dist", stand_in)


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=4,  # drawn anew in every session
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes and shows nothing
)
@given(
    layout=layouts,
    engine_ranks=st.sampled_from([1, 2, 8, 64]),
    name=st.sampled_from(["bf16", "int8", "fp8_channel", "fp8_block"]),
    experts=st.sampled_from([(0, 1), (8, 1), (8, 4)]),
    bucket_bytes=st.integers(1000, 30_000),
    box_size=st.sampled_from([300, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_received_parts_equal_slices_of_the_whole_quantised_model(
    meetings, layout, engine_ranks, name, experts, bucket_bytes, box_size, seed
):
    tensor, pipeline, data = layout
    count, spread = experts
    mixture = Experts(count=count, per_token=2, ffn_size=48, normalised=True) if count else None
    more = {"ffn_size": 48, "experts": mixture} if count else {"tied": True}
    spec = dataclasses.replace(SPEC, num_layers=max(pipeline, 2), **more)
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, data=data, expert=spread if data % spread == 0 else 1)
    format = WeightFormat(name=name)
    whole = whole_model(spec, seed)
    required = shares(spec, format, engine_ranks, seed)
    plan = plan_reshard(
        spec, parallel, format=format, bucket_bytes=bucket_bytes, uses_te_layer_names=False, required=required
    )
    slots = trainer_ranks(parallel, cpu_threads=1)
    groups = {(slot.pipeline_rank, slot.data_rank): Meeting(tensor) for slot in slots}
    memory = MemorySender()

    def send(slot) -> None:
        held = rank_shards(
            spec,
            parallel,
            tensor_rank=slot.tensor_rank,
            pipeline_rank=slot.pipeline_rank,
            data_rank=slot.data_rank,
            uses_te_layer_names=False,
        )
        packer = WeightPacker(
            plan,
            rank=slot.rank,
            held=held,
            parameters=parameters_of(held, whole),
            tensor_group=groups[slot.pipeline_rank, slot.data_rank] if tensor > 1 else None,
            fingerprints=lambda _: True,
        )
        packer.refresh_scales()
        packer.send(memory, WeightVersion(0))

    with mock.patch.object(packer_module, "CPU_BOX_SIZE", box_size), ThreadPoolExecutor(WORLD) as threads:
        list(threads.map(send, slots))
    manifest = plan.manifest("run", WeightVersion(0))
    manifest.check()
    expected = quantised_whole(plan, whole)
    for rank in range(engine_ranks):
        received = ReceivedPieces(manifest, memory, engine_rank=rank)
        for tensor_name, boxes in required[rank].items():
            for box in boxes:
                part = assembled(received, tensor_name, box)
                right = expected[tensor_name][box.slices((0,) * len(box.start))]
                assert torch.equal(part.view(torch.uint8), right.contiguous().view(torch.uint8)), (tensor_name, box)
