"""Which kernels the layers of a trainer have on a node: fused attention, unfused attention, or those of a CPU.

Transformer Engine 2.12.0 chooses the kernel (`attention/dot_product_attention/utils.py`, `get_attention_backend`).
cuDNN fuses attention over packed sequences from compute capability 9.0 on, but for 12.0 (`fused_attn.cpp`). The package
`flash-attn` fuses it from 8.0 on, in versions that Transformer Engine knows. Neither takes float32. All else is
unfused. FlashAttention 3 changes nothing here, because it is for 9.0 only.
"""

import re
from importlib import metadata

from launcher.cluster.node import NodeResources
from megatron_rl.activations import Kernels
from megatron_rl.config import TrainerConfig

FUSED_SINCE, WITHOUT_PACKED = (9, 0), (12, 0)
"""Lowest compute capability with cuDNN's attention over packed sequences, and a later one without it."""
FLASH_ATTENTION = ((2, 1, 1), (2, 8, 3))
"""First and last version of `flash-attn` that Transformer Engine 2.12.0 uses."""
FLASH_ATTENTION_SINCE_10 = (2, 7, 3)
"""First one that it uses on GPUs of compute capability 10.0 and above."""


def trainer_kernels(trainer: TrainerConfig, node: NodeResources, *, flash_attention: str = "") -> Kernels:
    """Kernels of a trainer's layers. A GPU of unknown capability counts as one with fused attention.

    Args:
        trainer: the trainer's configuration.
        node: says which devices there are.
        flash_attention: version of the package `flash-attn` on the node; empty without it.
    """
    if not node.gpu_bytes:
        return "local"
    if trainer.dtype == "fp32":
        return "unfused"
    capability = node.gpu_capability or FUSED_SINCE
    is_fused = capability >= FUSED_SINCE and capability != WITHOUT_PACKED
    return "fused" if is_fused or _is_used(flash_attention, capability) else "unfused"


def _is_used(flash_attention: str, capability: tuple[int, int]) -> bool:
    """Whether Transformer Engine uses this version of `flash-attn`. A suffix (`.post1`) makes a version later."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", flash_attention)
    if found is None or capability < (8, 0):
        return False
    *numbers, suffix = found.groups()
    first = FLASH_ATTENTION_SINCE_10 if capability >= (10, 0) else FLASH_ATTENTION[0]
    return first <= tuple(map(int, numbers)) and (*map(int, numbers), suffix) <= (*FLASH_ATTENTION[1], "")


def installed_flash_attention() -> str:
    """Version of `flash-attn` in this Python, which is that of the run's processes; empty without it."""
    try:
        return metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return ""


def attention_warnings(trainer: TrainerConfig, node: NodeResources, *, flash_attention: str = "") -> list[str]:
    """Warnings about the trainer's attention; arguments are those of `trainer_kernels`."""
    kernels = trainer_kernels(trainer, node, flash_attention=flash_attention)
    if kernels == "fused" and trainer.recompute == "selective":
        return [
            "`trainer.recompute` = selective repeats attention's forward and frees nothing, because attention is fused "
            "on this GPU; set it to none, or to full if memory is short"
        ]
    if kernels != "unfused":
        return []
    what = "the trainer's attention is unfused: it is slower, and memory holds scores of every pair of positions"
    if trainer.dtype == "fp32":
        return [f"`trainer.dtype` = fp32: {what}; set it to bf16 for fused attention"]
    capability, first, last = (".".join(map(str, each)) for each in (node.gpu_capability or (), *FLASH_ATTENTION))
    return [
        f"GPUs of compute capability {capability}: {what} (`attention scores` in the plan). The package `flash-attn` "
        f"{first} to {last} on every node fuses it; `run` counts no scores where it is installed, `plan` always does"
    ]
