"""vLLM's own kernels on stub devices, for the formats that the rehearsal compares with Hugging Face.

Each function has the arguments of an operation of vLLM 0.25.1 (`csrc/`, `vllm_flash_attn`) as tensors of the host that
share the device's memory, and writes its results into them. Only the arguments that our engines use are honoured; an
assertion says so for the others.
"""

from collections.abc import Callable

import torch

from tests.support.stub_cuda.twins import kernel

_libraries: list[torch.library.Library] = []


def rms_norm(result, input, weight, epsilon):
    wide = input.float()
    normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(input.dtype)
    result.copy_(normal if weight is None else normal * weight)


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)


def silu_and_mul(result, input):
    gate, up = input.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate.float()).to(input.dtype) * up)


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False):
    assert is_neox and not rope_dim_offset and not inverse
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, dim=-1)
    half = cos.shape[-1]
    for heads in (query, key):
        if heads is not None:
            rows = heads.view(len(cos), -1, head_size)
            first, second = rows[..., :half].clone(), rows[..., half : 2 * half].clone()
            rows[..., :half] = first * cos[:, None] - second * sin[:, None]
            rows[..., half : 2 * half] = second * cos[:, None] + first * sin[:, None]


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    used = slot_mapping >= 0
    slots, count = slot_mapping[used], len(slot_mapping)
    blocks, places = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        new = rows[:count][used]
        if kv_cache_dtype == "auto":
            cache[blocks, places] = new
        else:
            codes = torch.empty_like(new, dtype=torch.float8_e4m3fn)
            static_scaled_fp8_quant(codes, new, scale)
            cache.view(torch.uint8)[blocks, places] = codes.view(torch.uint8)


def static_scaled_fp8_quant(result, input, scale, group_shape=None):
    assert scale.numel() == 1, scale.shape
    largest = torch.finfo(result.dtype).max
    result.copy_((input.float() / scale).clamp(-largest, largest).to(result.dtype))


def flash_attention_3(q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, *rest):
    """Causal attention of each sequence over its pages; its queries are its last tokens.

    `rest` begins with cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table. Scales count for
    FP8 only, as in the kernel.
    """
    lengths, pages, softmax_scale = rest[2], rest[5], rest[14]
    descales = rest[11:14] if q.dtype == torch.float8_e4m3fn else (None, None, None)
    assert out is not None and pages is not None and lengths is not None and k_new is None
    for number, length in enumerate(lengths.tolist()):
        begin, end = cu_seqlens_q[number : number + 2].tolist()
        if begin == end or not length:
            continue
        found = q[begin:end], *(cache[pages[number].long()].flatten(0, 1)[:length] for cache in (k, v))
        queries, keys, values = (
            part.float().transpose(0, 1) * (1.0 if scale is None else scale[number].max())
            for part, scale in zip(found, descales, strict=True)
        )
        copies = queries.shape[0] // keys.shape[0]
        scores = queries @ keys.repeat_interleave(copies, 0).transpose(1, 2) * softmax_scale
        places = torch.arange(length - (end - begin), length)
        scores.masked_fill_(torch.arange(length) > places[:, None], float("-inf"))
        mixed = scores.softmax(-1) @ values.repeat_interleave(copies, 0)
        out[begin:end] = mixed.transpose(0, 1).to(out.dtype)
    return [out, torch.zeros(q.shape[1], q.shape[0]), out.new_empty(0), out.new_empty(0)]


def dynamic_scaled_int8_quant(result, input, scale, azp):
    assert azp is None
    wide = input.float()
    scale.copy_(wide.abs().amax(-1, keepdim=True) / 127.0)
    result.copy_((wide / scale.clamp(min=1e-30)).round().clamp(-128, 127))


def dynamic_per_token_scaled_fp8_quant(result, input, scale, scale_ub):
    assert scale_ub is None
    _into_fp8(result, input.float(), scale)


def per_token_group_fp8_quant(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0, *layout):
    """`layout` says how the strides of `output_s` came about."""
    assert not scale_ue8m0
    groups = input.float().reshape(*input.shape[:-1], -1, group_size)
    scales = torch.empty(*groups.shape[:-1], 1)
    codes = torch.empty(groups.shape, dtype=output_q.dtype)
    _into_fp8(codes, groups, scales)
    output_q.copy_(codes.reshape(input.shape))
    output_s.copy_(scales[..., 0])


def _into_fp8(codes, wide, scale):
    largest = torch.finfo(codes.dtype).max
    scale.copy_((wide.abs().amax(-1, keepdim=True) / largest).clamp(min=1.0 / (largest * 512.0)))
    codes.copy_((wide / scale).clamp(-largest, largest).to(codes.dtype))


def cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias):
    """Scales of rows and columns, or of groups of 128 inputs and of blocks of 128 x 128 weights."""
    left, right = a.float(), b.float()
    if b_scales.numel() == b.shape[1] or b_scales.numel() == 1:
        wide = (left @ right) * a_scales.reshape(-1, 1) * b_scales.reshape(1, -1)
    else:
        of_blocks = b_scales.repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)[:, : b.shape[1]]
        wide = (left * a_scales.repeat_interleave(128, 1)[:, : a.shape[1]]) @ (right * of_blocks)
    out.copy_(wide if bias is None else wide + bias)


def topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, bias):
    assert bias is None
    weights, chosen = gating_output.float().softmax(-1).topk(topk_weights.shape[1], dim=-1)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    topk_indices.copy_(chosen)
    token_expert_indices.copy_(torch.arange(chosen.numel()).view(chosen.shape[1], -1).t())


def moe_align_block_size(topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad, mapped):
    """Rows by expert; those of each are filled up to whole blocks, with a number beyond all rows."""
    assert mapped is None
    rows = topk_ids.flatten()
    sorted_token_ids.fill_(len(rows))
    used = 0
    for expert in range(num_experts):
        own = (rows == expert).nonzero()[:, 0]
        num_blocks = -(-len(own) // block_size)
        sorted_token_ids[used : used + len(own)] = own.to(sorted_token_ids.dtype)
        experts_ids[used // block_size : used // block_size + num_blocks] = expert
        used += num_blocks * block_size
    num_tokens_post_pad.fill_(used)


def moe_sum(input, output):
    output.copy_(input.float().sum(1))


def moe_permute(
    input, topk_ids, token_expert_indices, expert_map, n_expert, n_local_expert, topk, permuted_input, *rest
):
    """Rows of the same expert behind each other. `rest` begins with where each expert's begin, and both orders."""
    assert expert_map is None
    expert_first_token_offset, inv_permuted_idx, permuted_idx = rest[:3]
    experts = topk_ids.flatten().long()
    order = experts.argsort(stable=True)
    permuted_input.view(torch.uint8).copy_(input.view(torch.uint8)[order // topk])
    permuted_idx.copy_(order)
    inv_permuted_idx.copy_(order.argsort().view(inv_permuted_idx.shape))
    expert_first_token_offset[0] = 0
    expert_first_token_offset[1:] = torch.bincount(experts, minlength=n_local_expert).cumsum(0)


def moe_unpermute(
    permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset, topk, hidden_states
):
    rows = permuted_hidden_states.float()[inv_permuted_idx.view(-1, topk).long()]
    hidden_states.copy_((rows * topk_weights[:, :, None]).sum(1))


def cutlass_moe_mm(out, a, b, a_scales, b_scales, expert_offsets, *rest):
    """`rest`: sizes, strides of `a`, `b`, `out` by expert, and whether rows of `a` and outputs of `b` have scales."""
    assert rest[-2:] == (True, True), rest[-2:]
    for strides, width in zip(rest[1:4], (a.shape[1], a.shape[1], out.shape[1]), strict=True):
        assert strides.tolist() == [width] * len(b), f"an expert has strides of {strides.tolist()}, not {width}"
    ends = [*expert_offsets.tolist()[1:], len(a)]
    for expert, (begin, end) in enumerate(zip(expert_offsets.tolist(), ends, strict=True)):
        wide = a[begin:end].float() @ b[expert].float().t()
        out[begin:end] = (wide * a_scales[begin:end].reshape(-1, 1) * b_scales[expert].reshape(1, -1)).to(out.dtype)


KERNELS: dict[str, Callable[..., object]] = {
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": silu_and_mul,
    "_C::rotary_embedding": rotary_embedding,
    "_C::dynamic_scaled_int8_quant": dynamic_scaled_int8_quant,
    "_C::static_scaled_fp8_quant": static_scaled_fp8_quant,
    "_C::dynamic_per_token_scaled_fp8_quant": dynamic_per_token_scaled_fp8_quant,
    "_C::per_token_group_fp8_quant": per_token_group_fp8_quant,
    "_C::cutlass_scaled_mm": cutlass_scaled_mm,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
    "_moe_C::topk_softmax": topk_softmax,
    "_moe_C::moe_align_block_size": moe_align_block_size,
    "_moe_C::moe_sum": moe_sum,
    "_moe_C::moe_permute": moe_permute,
    "_moe_C::moe_permute_with_scratch": moe_permute,
    "_moe_C::moe_unpermute": moe_unpermute,
    "_C::cutlass_moe_mm": cutlass_moe_mm,
    "_vllm_fa3_C::fwd": flash_attention_3,
}


def install(*namespaces: str) -> None:
    """Replace the kernels of these namespaces, which are loaded."""
    for name, function in KERNELS.items():
        namespace, _, operation = name.partition("::")
        if namespace in namespaces:
            library = torch.library.Library(namespace, "IMPL", "CUDA")
            library.impl(operation, kernel(function), "CUDA", allow_override=True)
            _libraries.append(library)
