"""Memory of forward and backward passes of a trainer rank: activations and attention scores; estimates.

What a layer keeps depends on its kernels. A test compares the formulas with the storages that torch's autograd keeps on
a CPU, and with the bytes of the operations of unfused attention.

Unfused attention is that of Transformer Engine 2.12.0 (`attention/dot_product_attention/backends.py`, line 240). It
copies the packed sequences of a micro batch to [sequences, longest], and computes scores of every pair of positions for
every head: in BF16, in FP32 for the softmax, as probabilities in FP32, and in BF16.

Invariants: `trainer.recompute` with `recompute_method` and `recompute_num_layers` of `trainer.megatron` decides which
layers are kept. Pure: imports neither torch nor megatron.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config import TrainerConfig
from megatron_rl.model.spec import ModelSpec, stage_layers

Kernels = Literal["fused", "unfused", "local"]
"""Kernels of a trainer's layers: Transformer Engine's with fused or with unfused attention, or torch's on a CPU."""

SCORE_BYTES = 12
"""Most bytes of a score while unfused attention runs forward or backward."""
KEPT_SCORE_BYTES = {"bf16": 6, "fp32": 8}
"""Bytes of a score that are kept for the backward pass: probabilities in FP32, and in `trainer.dtype`."""
MEAN_SAMPLE = 4
"""A mean sample is assumed to have the longest sample's tokens divided by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLayers:
    """What a pipeline stage holds at most, over all micro batches in flight."""

    inputs: int
    """Inputs of layers that are computed again."""
    whole: int
    """Layers with everything that their backward pass needs."""


def kept_layers(trainer: TrainerConfig, num_layers: int, in_flight: int) -> KeptLayers:
    """What a stage of `num_layers` layers holds for `in_flight` micro batches.

    `uniform` recomputation keeps the input of every chunk of layers, and one chunk at a time is whole. `block` does so
    with single layers, the first ones of the stage, and keeps the others, whose backward has ended then.
    """
    if trainer.recompute != "full":
        return KeptLayers(inputs=0, whole=in_flight * num_layers)
    method, size = recomputation(trainer)
    size = max(1, min(size, num_layers))
    if method == "uniform":
        return KeptLayers(inputs=in_flight * -(-num_layers // size), whole=size)
    others = num_layers - size
    return KeptLayers(inputs=in_flight * size, whole=(in_flight - 1) * others + max(others, 1))


def recomputation(trainer: TrainerConfig) -> tuple[str, int]:
    """Megatron's `recompute_method` and `recompute_num_layers` of a trainer with `trainer.recompute` = full."""
    fields = trainer.megatron
    return str(fields.get("recompute_method", "uniform")), int(fields.get("recompute_num_layers", 1))


def recomputed_share(spec: ModelSpec, trainer: TrainerConfig) -> float:
    """Share of the layers whose forward is computed again in a backward pass."""
    if trainer.recompute != "full":
        return 0.0
    method, size = recomputation(trainer)
    if method == "uniform":
        return 1.0
    stages = stage_layers(spec.num_layers, trainer.parallel.pipeline)
    return sum(min(size, len(stage)) for stage in stages) / spec.num_layers


def micro_batch_tokens(trainer: TrainerConfig, longest_sample: int) -> int:
    """Most tokens of a micro batch. A sample above `trainer.max_micro_batch_tokens` has one of its own."""
    return max(trainer.max_micro_batch_tokens, longest_sample)


def activation_bytes(
    spec: ModelSpec, trainer: TrainerConfig, *, pipeline_rank: int, tokens: int, kernels: Kernels = "fused"
) -> int:
    """Bytes kept for the backward pass by one pipeline stage, without scores of unfused attention.

    By layer and token: input and output of both norms, the residual, and what attention and the feed-forward network
    keep (`_attention_elements`, `_network_elements`). `selective` recomputation repeats attention, of which only scores
    would be freed. Everything is cut by tensor and sequence parallelism (Korthikanti et al. 2022, section 4), except
    the gathered inputs of one product, and the routed inputs of experts (`_routed_elements`). Stage n of N keeps N - n
    micro batches (1F1B).

    Args:
        spec: the model's architecture.
        trainer: the trainer's configuration.
        pipeline_rank: number of the stage.
        tokens: tokens of a micro batch.
        kernels: kernels of the layers.
    """
    hidden, parallel = spec.hidden_size, trainer.parallel
    width = 2 if trainer.dtype == "bf16" else 4
    layer = 5 * hidden + _attention_elements(spec, kernels) + _network_elements(spec, trainer, kernels)
    num_layers = len(stage_layers(spec.num_layers, parallel.pipeline)[pipeline_rank])
    kept = kept_layers(trainer, num_layers, parallel.pipeline - pipeline_rank)
    whole = kept.whole * _routed_elements(spec) + (2 * hidden if parallel.tensor > 1 else 0)
    return tokens * width * ((kept.inputs * hidden + kept.whole * layer) // parallel.tensor + whole)


def _attention_elements(spec: ModelSpec, kernels: Kernels) -> int:
    """Elements of a token: query, key, value and output, and query and key before their norms.

    On a CPU every query head has a key and a value of its own, and the outputs of all sequences are joined in a copy
    (`megatron_rl.model.attention`). The key before its norm is a view there, which keeps the whole product.
    """
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if kernels == "local":
        return (2 * queries + 2 * keys if spec.qk_norm else 0) + 5 * queries
    return (queries + keys if spec.qk_norm else 0) + 2 * queries + 2 * keys


def _network_elements(spec: ModelSpec, trainer: TrainerConfig, kernels: Kernels) -> int:
    """Elements of a token: both halves of the first product, and the input of the second.

    Without a fused activation also the activated half and the other one with its offset. An expert's network then also
    keeps the product before the router's weight.
    """
    fused = bool(trainer.megatron.get("bias_activation_fusion", kernels != "local"))
    if spec.experts is None:
        return (3 if fused else 5) * spec.ffn_size
    return spec.experts.per_token * (3 if fused else 6) * spec.ffn_size


def _routed_elements(spec: ModelSpec) -> int:
    """Elements of a token as inputs of its experts, which tensor parallelism does not cut.

    Every rank has a part of each expert, so Megatron gathers the routed inputs before the experts' first product, which
    keeps them (Megatron-Core 0.16.1, `moe/token_dispatcher.py`, `MoEAlltoAllTokenDispatcher.dispatch_postprocess`).
    """
    return 0 if spec.experts is None else spec.experts.per_token * spec.hidden_size


def score_bytes(spec: ModelSpec, trainer: TrainerConfig, *, pipeline_rank: int, longest_sample: int) -> int:
    """Bytes of attention scores of one pipeline stage with unfused attention.

    Without recomputation every layer keeps its probabilities; with `selective` one layer at a time has scores.

    Args:
        spec: the model's architecture.
        trainer: the trainer's configuration.
        pipeline_rank: number of the stage.
        longest_sample: tokens of prompt and response.
    """
    parallel = trainer.parallel
    num_layers = len(stage_layers(spec.num_layers, parallel.pipeline)[pipeline_rank])
    kept = kept_layers(trainer, num_layers, parallel.pipeline - pipeline_rank)
    layers = 1 if trainer.recompute == "selective" else kept.whole
    of_score = SCORE_BYTES + (layers - 1) * KEPT_SCORE_BYTES[trainer.dtype]
    return of_score * -(-spec.num_heads // parallel.tensor) * most_pairs(trainer, longest_sample)


def most_pairs(trainer: TrainerConfig, longest_sample: int) -> int:
    """Most pairs of positions that unfused attention computes for a head: sequences x the longest one squared.

    A sample above `trainer.max_micro_batch_tokens` is alone. Else one sample of any length is joined by mean ones and a
    shorter one: an assumption, because many short samples beside a long one would have more pairs. With tensor
    parallelism the padding of a micro batch is one more sequence.
    """
    padding = 1 if trainer.parallel.tensor > 1 else 0
    tokens, mean = trainer.max_micro_batch_tokens, max(1, longest_sample // MEAN_SAMPLE)
    alone = (1 + padding) * longest_sample**2
    joined = [
        (2 + others + padding) * min(longest_sample, tokens - others * mean) ** 2
        for others in range(-(-tokens // mean))
    ]
    return max([alone, *joined])
