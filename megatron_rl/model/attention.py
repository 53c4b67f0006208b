"""Core attention over packed sequences, for Megatron's local layer spec.

Megatron's `DotProductAttention` refuses packed batches, and Transformer Engine, which accepts them (`thd`), needs CUDA.
This module runs torch's fused attention over each segment of `cu_seqlens`, so CPU and CUDA share one packed batch
format. It has the arguments of Megatron's core attention and no parameters.

Shape legend: T rows of the packed batch, N query heads and M key/value heads of this rank, D head size.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(torch.nn.Module):
    """Causal attention within each segment."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention output, [T, N, D], from query [T, N, D] and key, value [T, M, D].

        Raises:
            ValueError: the batch is not packed; no other mask is implemented.
        """
        if packed_seq_params is None:
            raise ValueError(
                "PackedAttention got a batch without packed_seq_params; pack it (megatron_rl.model.packed_batch)"
            )
        return packed_causal_attention(query, key, value, packed_seq_params.cu_seqlens_q, scale=self.softmax_scale)


def packed_causal_attention(
    query_TND: torch.Tensor,
    key_TMD: torch.Tensor,
    value_TMD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention within each segment, [T, N, D]; `cu_seqlens` [B + 1] holds their starts and T."""
    groups = query_TND.shape[1] // key_TMD.shape[1]
    # repeated key and value heads: the CPU has no fused kernel for grouped heads
    key_TND = key_TMD.repeat_interleave(groups, dim=1) if groups > 1 else key_TMD
    value_TND = value_TMD.repeat_interleave(groups, dim=1) if groups > 1 else value_TMD
    # `split` has one backward for all segments; each slice would fill a gradient of T rows
    lengths = cu_seqlens.diff().tolist()
    outputs = [
        scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            scale=scale,
        )[0].transpose(0, 1)
        for query, key, value in zip(
            torch.split(query_TND, lengths),
            torch.split(key_TND, lengths),
            torch.split(value_TND, lengths),
            strict=True,
        )
    ]
    return torch.cat(outputs)
