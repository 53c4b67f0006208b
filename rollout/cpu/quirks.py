"""Faults of vLLM's CPU kernels and processes that have to be worked around, one function each.

The rules are those of `rollout.worker.vllm_quirks`: each function is named after the symptom and looks at the
kernel or symbol in use; a test fails once the fault is gone.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

_PACKED_ROWS = 32
"""Rows (output channels) of a block of the packed INT8 kernel, which takes whole blocks only."""
_STAND_INS = "vllm.utils.cpu_triton_utils"
"""Where vLLM keeps CPU functions for its Triton kernels; builds without a CPU backend may lack it."""


def first_small_batch_dies_with_illegal_instruction() -> None:
    """Ask the kernel for the AMX tiles, which vLLM does not do before its first INT8 or BF16 kernel needs them."""
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()


def int8_logits_are_uniform_after_reload() -> None:
    """Give oneDNN's INT8 handles a copy of the scales, and keep it as long as the handle.

    A handle holds a raw pointer to the scales that it was made from. After a reload vLLM copies them into the layer's
    old storage and frees the tensor that the handle points to.
    """
    create = getattr(ops, "create_onednn_scaled_mm", None)
    if create is None or hasattr(create, "keeps_scales"):
        return

    def create_keeping_scales(
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        output_type: torch.dtype,
        dynamic_quant: bool,
        use_azp: bool,
        primitive_cache_size: int = 128,
    ) -> ops.CPUDNNLGEMMHandler:
        kept = weight_scales.detach().clone()
        handler = create(weight, kept, output_type, dynamic_quant, use_azp, primitive_cache_size)
        handler.kept_scales = kept
        return handler

    create_keeping_scales.keeps_scales = True  # type: ignore[attr-defined]
    ops.create_onednn_scaled_mm = create_keeping_scales


def int8_kernel_refuses_rows_that_vllm_offers_it() -> None:
    """Send matrices with N % 32 != 0 rows to oneDNN: vLLM offers its AMX kernel N % 16 == 0, and packing them raises.

    Only `check_cpu_sgl_kernel` of the INT8 layers is wrapped; where it refuses a matrix, the answer stays.
    """
    module = import_module("vllm.model_executor.kernels.linear.scaled_mm.cpu")
    check = module.check_cpu_sgl_kernel
    if hasattr(check, "takes_whole_blocks"):
        return

    def check_whole_blocks(num_rows: int, num_columns: int, dtype: torch.dtype) -> bool:
        if dtype == torch.int8 and num_rows % _PACKED_ROWS:
            return False
        return bool(check(num_rows, num_columns, dtype))

    check_whole_blocks.takes_whole_blocks = True  # type: ignore[attr-defined]
    module.check_cpu_sgl_kernel = check_whole_blocks  # type: ignore[attr-defined]


def tied_head_multiplies_by_old_embedding_after_reload(model: nn.Module) -> None:
    """Pack a tied `lm_head` again: its packed copy was made from the embedding before the reload."""
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(head, "cpu_linear"):
        return
    if head.weight is embedding.weight:
        head.quant_method.process_weights_after_loading(head)


def drafted_rows_are_sampled_at_a_random_temperature() -> None:
    """Spread a value per request over the tokens of its draft: temperature, top-p, top-k.

    The CPU stand-in for the kernel writes into a converted copy of its output unless that is int64, so the values that
    logits are divided by are whatever the memory held.
    """
    if not _stands_in(rejection_sampler, "expand_kernel"):
        return

    def expand_batch_to_tokens(
        values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        """Values [R] to [num_tokens]; the tokens of row r end before `ends[r]`."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def padding_of_a_draft_is_accepted() -> None:
    """Reject the -1 with which a draft is padded, also where responses are sampled.

    The scheduler pads where all but one token of a request were in the prefix cache. The CPU stand-in for the kernel
    looks up the probability of token -1, which is the number before the row's first, and may accept by it; what
    follows is then sampled behind a token that is not there.
    """
    if not _stands_in(rejection_sampler, "rejection_random_sample_kernel"):
        return
    sample = rejection_sampler._rejection_random_sample
    if hasattr(sample, "rejects_padding"):
        return

    def rejecting_padding(
        output_token_ids: torch.Tensor,
        ends: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        recovered_token_ids: torch.Tensor,
        uniform_probs: torch.Tensor,
        *more: object,
    ) -> None:
        drafts = draft_token_ids.clamp(min=0)
        # a draft is accepted if its probability is not less
        bars = uniform_probs.masked_fill(draft_token_ids < 0, 2.0)
        sample(
            output_token_ids, ends, drafts, draft_probs, target_probs, bonus_token_ids, recovered_token_ids, bars, *more
        )

    rejecting_padding.rejects_padding = True  # type: ignore[attr-defined]
    rejecting_padding.register_warmup = sample.register_warmup  # type: ignore[attr-defined]
    rejection_sampler._rejection_random_sample = rejecting_padding


def _stands_in(module: ModuleType, kernel: str) -> bool:
    """Whether vLLM has put its CPU function in the place of a kernel."""
    if find_spec(_STAND_INS) is None:
        return False
    function = getattr(import_module(_STAND_INS), f"_{kernel}_impl", None)
    return function is not None and getattr(getattr(module, kernel, None), "func", None) is function


def segments_of_tensor_parallel_ranks_outlive_their_engine() -> None:
    """Unlink the shared memory through which the ranks of a CPU engine reduce, once all of them have it mapped."""
    name = os.environ.get("VLLM_DIST_IDENT")
    for path in Path("/dev/shm").glob(f"{name}-*") if name else ():
        path.unlink(missing_ok=True)


def experts_multiply_by_unpacked_weights_after_reload(model: nn.Module) -> None:
    """Let CPU kernels pack the weights of experts at every load, as they do at the first.

    vLLM takes a layer that has its kernel for one whose packed memory only has to be filled again, and copies what it
    has loaded there as it is.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
            layer.quant_method.moe_kernel = None  # type: ignore[union-attr]


class _LookedUp(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Of an embedding that nothing is multiplied by."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weights as they are."""


def embedding_is_held_twice(model: nn.Module) -> None:
    """Do without the copy of the embedding that CPU kernels would multiply by, where it is no output layer."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if type(layer) is not VocabParallelEmbedding or layer is getattr(model, "lm_head", None):
            continue
        if type(layer.quant_method) is UnquantizedEmbeddingMethod:
            layer.quant_method = _LookedUp()
            layer.__dict__.pop("cpu_linear", None)


def output_layer_is_packed_beside_its_old_copy(model: nn.Module) -> None:
    """Let go of the copy of `lm_head` that CPU kernels multiply by; loading packs a new one.

    It is the largest matrix of many models, and vLLM would hold the old copy until the new one is made. A tied one is
    packed after the reload, and only if it was before.
    """
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    weight = getattr(head, "weight", None)
    if current_platform.is_cpu() and weight is not None and weight is not getattr(embedding, "weight", None):
        head.__dict__.pop("cpu_linear", None)
