"""Weights of a CUDA device that are published through host memory: shared memory, gloo, deltas."""

import pytest
import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.weights.fp8_passthrough import parameter_shapes
from megatron_rl.weights.packer import WeightPacker
from megatron_rl.weights.reshard_plan import plan_reshard
from megatron_rl.weights.shards import rank_shards
from rollout.types import WeightVersion
from rollout.weights.format import WeightFormat
from tests.megatron_rl.weights.test_packer_fp8 import SPEC
from tests.support.trainers.memory_sender import MemorySender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def sent_bytes(format: str, device: str) -> dict[int, bytes]:
    """Content of each bucket in host memory."""
    parallel = ParallelConfig()
    random = torch.Generator().manual_seed(0)
    held = rank_shards(SPEC, parallel, tensor_rank=0, pipeline_rank=0, uses_te_layer_names=True)
    shapes = parameter_shapes(held)
    packer = WeightPacker(
        plan_reshard(SPEC, parallel, format=WeightFormat(name=format), bucket_bytes=20_000, uses_te_layer_names=True),
        rank=0,
        held=held,
        parameters={
            name: torch.nn.Parameter(torch.randn(shape, generator=random).bfloat16().to(device))
            for name, shape in shapes.items()
        },
        tensor_group=None,
        fingerprints=lambda _: True,
    )
    sender = MemorySender()
    packer.refresh_scales()
    packer.send(sender, WeightVersion(1))
    return sender.contents


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8_channel", "fp8_block"])
def test_a_device_sends_through_host_memory_what_a_host_sends(format: str) -> None:
    assert sent_bytes(format, "cuda") == sent_bytes(format, "cpu")
