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
FLASH_ATTENTION_FROM = (8, 0)
"""Lowest compute capability on which Transformer Engine uses `flash-attn`."""
FLASH_ATTENTION = ((2, 1, 1), (2, 8, 3))
"""First and last version of `flash-attn` that Transformer Engine 2.12.0 uses."""
FLASH_ATTENTION_SINCE_10 = (2, 7, 3)
"""First one that it uses on GPUs of compute capability 10.0 and above."""


def trainer_kernels(trainer: TrainerConfig, node: NodeResources, *, flash_attention: str | None = "") -> Kernels:
    """Kernels of a trainer's layers. A GPU of unknown capability counts as one with fused attention.

    Args:
        trainer: the trainer's configuration.
        node: says which devices there are.
        flash_attention: version of the package `flash-attn` on the node; empty without it. None is an unknown one,
            which counts as installed.
    """
    if not node.gpu_bytes:
        return "local"
    if trainer.dtype == "fp32":
        return "unfused"
    capability = node.gpu_capability or FUSED_SINCE
    is_fused = capability >= FUSED_SINCE and capability != WITHOUT_PACKED
    return "fused" if is_fused or _is_used(flash_attention, capability) else "unfused"


def _is_used(flash_attention: str | None, capability: tuple[int, int]) -> bool:
    """Whether Transformer Engine uses this version of `flash-attn`. A suffix (`.post1`) makes a version later."""
    if flash_attention is None or capability < FLASH_ATTENTION_FROM:
        return capability >= FLASH_ATTENTION_FROM
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", flash_attention)
    if found is None:
        return False
    *numbers, suffix = found.groups()
    first, last = _first_version(capability), FLASH_ATTENTION[1]
    return first <= tuple(map(int, numbers)) and (*map(int, numbers), suffix) <= (*last, "")


def _first_version(capability: tuple[int, int]) -> tuple[int, int, int]:
    """First version of `flash-attn` that Transformer Engine uses on a GPU of this compute capability."""
    return FLASH_ATTENTION_SINCE_10 if capability >= (10, 0) else FLASH_ATTENTION[0]


def installed_flash_attention() -> str:
    """Version of `flash-attn` in this Python, which is that of the run's processes; empty without it."""
    try:
        return metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return ""


def attention_warnings(trainer: TrainerConfig, node: NodeResources, *, flash_attention: str | None = "") -> list[str]:
    """Warnings about the trainer's attention; arguments are those of `trainer_kernels`.

    An unknown version causes the warning of a missing one, which says that the run may be refused.
    """
    kernels = trainer_kernels(trainer, node, flash_attention=flash_attention or "")
    if kernels == "fused" and trainer.recompute == "selective":
        return [
            "`trainer.recompute` = selective repeats attention's forward and frees nothing, because attention is fused "
            "on this GPU; set it to none, or to full if memory is short"
        ]
    if kernels != "unfused":
        return []
    what = "the trainer's attention is unfused: it is slower, and memory holds scores of every pair of positions"
    capability = node.gpu_capability or FUSED_SINCE
    versions = f"`flash-attn` {_text(_first_version(capability))} to {_text(FLASH_ATTENTION[1])} on every node"
    if trainer.dtype == "fp32":
        in_bf16 = trainer.model_copy(update={"dtype": "bf16"})
        if trainer_kernels(in_bf16, node, flash_attention=flash_attention or "") == "fused":
            return [f"`trainer.dtype` = fp32: {what}; set it to bf16 for fused attention"]
        fix = f"; set it to bf16 and install {versions} for fused attention"
        return [f"`trainer.dtype` = fp32: {what}{fix if capability >= FLASH_ATTENTION_FROM else ''}"]
    warning = f"GPUs of compute capability {_text(capability)}: {what} (`attention scores` in the plan)"
    if capability < FLASH_ATTENTION_FROM:
        return [warning]
    if flash_attention is None:
        counted = "packages of the container are unknown here, so no scores are counted; the job judges by its own"
    else:
        counted = "`run` and `sft` count no scores where it is installed, `plan` always does"
    return [f"{warning}. The package {versions} fuses it; {counted}"]


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
