"""Workarounds for faults of vLLM's CPU kernels and processes, one function each.

The rules are those of `rollout.worker.vllm_quirks`: each function is named after the symptom and checks the kernel or
symbol in use, and a test fails once the fault is gone.
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
"""Rows (output channels) of a block of the packed INT8 kernel, which supports whole blocks only."""
_STAND_INS = "vllm.utils.cpu_triton_utils"
"""vLLM's module of CPU functions that replace Triton kernels; builds without a CPU backend may lack it."""


def first_small_batch_dies_with_illegal_instruction() -> None:
    """Request AMX tiles from the operating system; vLLM does so only after its first INT8 or BF16 kernel needs them."""
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()


def int8_logits_are_uniform_after_reload() -> None:
    """Give each oneDNN INT8 handle its own copy of the scales, which lives as long as the handle.

    A handle holds a raw pointer to the scales that it was made from. After a reload, vLLM copies the scales into the
    layer's old storage and frees the tensor that the handle points to.
    """
    create = getattr(ops, "create_onednn_scaled_mm", None)
    if create is None or hasattr(create, "owns_scales"):
        return

    def create_owning_scales(
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        output_type: torch.dtype,
        dynamic_quant: bool,
        use_azp: bool,
        primitive_cache_size: int = 128,
    ) -> ops.CPUDNNLGEMMHandler:
        owned = weight_scales.detach().clone()
        handler = create(weight, owned, output_type, dynamic_quant, use_azp, primitive_cache_size)
        handler.owned_scales = owned
        return handler

    create_owning_scales.owns_scales = True  # type: ignore[attr-defined]
    ops.create_onednn_scaled_mm = create_owning_scales


def int8_kernel_refuses_rows_that_vllm_offers_it() -> None:
    """Send matrices with N % 32 != 0 rows to oneDNN. vLLM chooses its AMX kernel for N % 16 == 0; packing then raises.

    Only `check_cpu_sgl_kernel` of the INT8 layers is wrapped. Its refusals stay.
    """
    module = import_module("vllm.model_executor.kernels.linear.scaled_mm.cpu")
    check = module.check_cpu_sgl_kernel
    if hasattr(check, "needs_whole_blocks"):
        return

    def check_whole_blocks(num_rows: int, num_columns: int, dtype: torch.dtype) -> bool:
        if dtype == torch.int8 and num_rows % _PACKED_ROWS:
            return False
        return bool(check(num_rows, num_columns, dtype))

    check_whole_blocks.needs_whole_blocks = True  # type: ignore[attr-defined]
    module.check_cpu_sgl_kernel = check_whole_blocks  # type: ignore[attr-defined]


def tied_head_multiplies_by_old_embedding_after_reload(model: nn.Module) -> None:
    """Pack a tied `lm_head` again, because its packed copy was made from the embedding before the reload."""
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(head, "cpu_linear"):
        return
    if head.weight is embedding.weight:
        head.quant_method.process_weights_after_loading(head)


def drafted_rows_are_sampled_at_a_random_temperature() -> None:
    """Repeat a request's value (temperature, top-p, top-k) for every token of its draft.

    The CPU replacement of the kernel writes into a converted copy of its output unless the output is int64. So logits
    are divided by uninitialised memory.
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
    """Reject the -1 that pads a draft, also in random sampling.

    The scheduler pads drafts if all but one token of a request were in the prefix cache. The CPU replacement of the
    kernel reads the probability of token -1, which is the number before the row's first, and may accept the token.
    Later tokens are then sampled after a token that does not exist.
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
        # a draft token is accepted if its probability is at least this number
        thresholds = uniform_probs.masked_fill(draft_token_ids < 0, 2.0)
        sample(
            output_token_ids,
            ends,
            drafts,
            draft_probs,
            target_probs,
            bonus_token_ids,
            recovered_token_ids,
            thresholds,
            *more,
        )

    rejecting_padding.rejects_padding = True  # type: ignore[attr-defined]
    rejecting_padding.register_warmup = sample.register_warmup  # type: ignore[attr-defined]
    rejection_sampler._rejection_random_sample = rejecting_padding


def _stands_in(module: ModuleType, kernel: str) -> bool:
    """Whether vLLM has replaced a kernel by its CPU function."""
    if find_spec(_STAND_INS) is None:
        return False
    function = getattr(import_module(_STAND_INS), f"_{kernel}_impl", None)
    return function is not None and getattr(getattr(module, kernel, None), "func", None) is function


def segments_of_tensor_parallel_ranks_outlive_their_engine() -> None:
    """Unlink the shared memory for reductions between ranks of a CPU engine, once all ranks have mapped it."""
    name = os.environ.get("VLLM_DIST_IDENT")
    for path in Path("/dev/shm").glob(f"{name}-*") if name else ():
        path.unlink(missing_ok=True)


def experts_multiply_by_unpacked_weights_after_reload(model: nn.Module) -> None:
    """Make CPU kernels pack the weights of experts at every load, as at the first.

    If a layer has its kernel already, vLLM only fills the packed memory again, and copies the loaded weights there
    without packing them.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
            layer.quant_method.moe_kernel = None  # type: ignore[union-attr]


class _LookedUp(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Method of an embedding that is only looked up, never multiplied by."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: weights stay unpacked."""


def embedding_is_held_twice(model: nn.Module) -> None:
    """Skip the packed copy of the embedding that CPU kernels make, unless it is the output layer too."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if type(layer) is not VocabParallelEmbedding or layer is getattr(model, "lm_head", None):
            continue
        if type(layer.quant_method) is UnquantizedEmbeddingMethod:
            layer.quant_method = _LookedUp()
            layer.__dict__.pop("cpu_linear", None)


def output_layer_is_packed_beside_its_old_copy(model: nn.Module) -> None:
    """Release the packed copy of `lm_head` before a reload, which packs a new copy.

    `lm_head` is the largest matrix of many models, and vLLM would hold the old copy until the new copy exists. A tied
    `lm_head` is packed after the reload, only if it was packed before.
    """
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    weight = getattr(head, "weight", None)
    if current_platform.is_cpu() and weight is not None and weight is not getattr(embedding, "weight", None):
        head.__dict__.pop("cpu_linear", None)
