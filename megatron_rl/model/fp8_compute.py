"""FP8 matrix products of the trainer: Megatron's settings, requirements of the machine, and how to switch it off.

The recipe is Transformer Engine's block scaling (`Float8BlockScaling`): weights in blocks of 128 x 128, activations and
gradients in blocks of 1 x 128, e4m3 in both passes, powers of two as scales. Embedding, output layer, norms and routers
are not FP8. With `blockwise_param`, weights exist in FP8 only (`megatron_rl.quantization.fp8_parameters`), next to the
optimizer's FP32 master weights.

Sources: megatron-core 0.16.1 `fp8_utils.get_fp8_context`, `transformer_block.TransformerBlock` (a context for each
layer, when it is built and when it is called); transformer_engine 2.12 `pytorch/utils.py`, `pytorch/module/base.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from megatron.core.transformer import MegatronModule

from megatron_rl.config import Fp8
from megatron_rl.quantization.fp8_parameters import buffers, is_fp8_parameter

ROWS = 16
"""FP8 products need packed batches padded to a multiple of this many rows (`get_fp8_align_size`)."""

GATHERED_ROWS = 128
"""Row multiple per tensor-parallel rank, to gather whole blocks (`assert_dim_for_all_gather`)."""


def config_fields(fp8: Fp8) -> dict[str, object]:
    """FP8 fields of `TransformerConfig`."""
    if fp8 == "none":
        return {}
    return {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": fp8 == "blockwise_param"}


def row_multiple(fp8: Fp8, *, tensor: int) -> int:
    """Row multiple of a packed batch on a CUDA device."""
    return tensor * (GATHERED_ROWS if fp8 != "none" and tensor > 1 else ROWS)


def check_machine(fp8: Fp8) -> None:
    """Refuse FP8 on machines without kernels for it.

    Raises:
        ValueError: no CUDA device, no Transformer Engine, or a device or CUDA that block scaling does not run on.
    """
    if fp8 == "none":
        return
    if not torch.cuda.is_available() or find_spec("transformer_engine") is None:
        missing = "Transformer Engine" if torch.cuda.is_available() else "a CUDA device"
        raise ValueError(f"trainer.fp8 = {fp8} needs {missing}, which is not here; set it to none")
    import transformer_engine.pytorch as te

    available, reason = te.is_fp8_block_scaling_available(return_reason=True)
    if not available:
        raise ValueError(f"trainer.fp8 = {fp8} on {torch.cuda.get_device_name()}: {reason}; set it to none")


def check_parameters(model: torch.nn.Module, fp8: Fp8) -> None:
    """Check that Megatron has built FP8 parameters if and only if they were requested.

    Raises:
        RuntimeError: no parameter is FP8 although requested, or the reverse.
    """
    num_fp8 = sum(is_fp8_parameter(parameter) for parameter in model.parameters())
    if bool(num_fp8) != (fp8 == "blockwise_param"):
        raise RuntimeError(f"trainer.fp8 = {fp8}, but Megatron has built {num_fp8} FP8 parameters")


@contextmanager
def without_fp8(models: Sequence[MegatronModule]) -> Iterator[None]:
    """Matrix products in the parameters' dtype within the context. Layers inside must not hold FP8 parameters."""
    before = [model.config.fp8 for model in models]
    for model in models:
        model.config.fp8 = None
    try:
        yield
    finally:
        for model, fp8 in zip(models, before, strict=True):
            model.config.fp8 = fp8


def drop_copies(model: torch.nn.Module) -> int:
    """Free the FP8 copies of BF16 weights that layers keep between micro batches; returns their bytes.

    The first micro batch of the next step creates them again (`get_weight_workspace`).
    """
    freed = 0
    for module in model.modules():
        copies: dict[str, torch.Tensor] = getattr(module, "_fp8_workspaces", {})
        freed += sum(part.nbytes for copy in copies.values() for part in buffers(copy))
        copies.clear()
    return freed
