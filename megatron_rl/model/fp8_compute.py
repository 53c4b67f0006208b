"""FP8 in the trainer's matrix products: what Megatron is told, what the machine must have, and how to do without it.

The recipe is Transformer Engine's block scaling (`Float8BlockScaling`): weights by blocks of 128 x 128, activations
and gradients by 1 x 128, e4m3 in both directions, scales that are powers of two. Embedding, output layer, norms and
routers stay as they are. With `blockwise_param` the weights exist in FP8 only
(`megatron_rl.quantization.fp8_parameters`), beside the optimizer's FP32 masters.

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
"""Rows that FP8 products want packed batches padded to (`get_fp8_align_size`)."""

GATHERED_ROWS = 128
"""The same of each tensor-parallel rank: activations are gathered in whole blocks (`assert_dim_for_all_gather`)."""


def config_fields(fp8: Fp8) -> dict[str, object]:
    """Fields of Megatron's `TransformerConfig`; `fp8_param` is never the user's, other recipes of compute may be."""
    if fp8 == "none":
        return {"fp8_param": False}
    return {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": fp8 == "blockwise_param"}


def row_multiple(fp8: Fp8, *, tensor: int) -> int:
    """What rows of a packed batch are padded to on a CUDA device."""
    return tensor * (GATHERED_ROWS if fp8 != "none" and tensor > 1 else ROWS)


def check_machine(fp8: Fp8) -> None:
    """Refuse FP8 where there are no kernels for it.

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
    """Hold what Megatron has built against what was asked for.

    Raises:
        RuntimeError: parameters were to be FP8 and none is, or the other way round.
    """
    found = sum(is_fp8_parameter(parameter) for parameter in model.parameters())
    if bool(found) != (fp8 == "blockwise_param"):
        raise RuntimeError(f"trainer.fp8 = {fp8}, but Megatron has built {found} FP8 parameters")


@contextmanager
def without_fp8(models: Sequence[MegatronModule]) -> Iterator[None]:
    """Products in the parameters' dtype for a while; parameters that are FP8 must not be met inside."""
    before = [model.config.fp8 for model in models]
    for model in models:
        model.config.fp8 = None
    try:
        yield
    finally:
        for model, fp8 in zip(models, before, strict=True):
            model.config.fp8 = fp8


def drop_copies(model: torch.nn.Module) -> int:
    """Give back the FP8 copies of BF16 weights that layers keep between micro batches; returns their bytes.

    The first micro batch of the next step makes them anew (`get_weight_workspace`).
    """
    freed = 0
    for module in model.modules():
        copies: dict[str, torch.Tensor] = getattr(module, "_fp8_workspaces", {})
        freed += sum(part.nbytes for copy in copies.values() for part in buffers(copy))
        copies.clear()
    return freed
