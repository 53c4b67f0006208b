"""Memory estimates of trainer ranks and engine ranks, before they start.

A rough estimate that refuses impossible configurations and names the key that helps. It counts memory that grows with
the model and the batch: parameters, gradients, Adam's states, activations of one micro batch, logits of one chunk, and
the KV cache. It adds a fixed amount for a process with its libraries. Fragmentation and workspaces are not counted.

Invariants: parameter counts are exact for the supported families (a test compares with transformers). Every other item
grows with the key that it names. Pure: imports neither torch nor megatron.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config import Fp8, TrainerConfig
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.reshard_plan import wire_tensors
from rollout.weights.format import FP8_BLOCK, WeightFormat

TRAINER_PROCESS_BYTES = 700 << 20
"""A Python process with torch, Megatron and a gloo group, no model; an estimate."""
ENGINE_PROCESS_BYTES = 1500 << 20
"""The two processes of an AsyncLLM engine without weights and KV cache. Each further rank adds half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One use of memory."""

    what: str
    num_bytes: int
    knob: str
    """The configuration key that shrinks it."""


def linear_parameters(spec: ModelSpec) -> int:
    """Elements of all 2-D decoder-layer weights, which an 8-bit format quantises."""
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (2 * query + 2 * key_value)
    networks = 1 if spec.experts is None else spec.experts.count
    return spec.num_layers * (attention + networks * 3 * spec.hidden_size * spec.ffn_size)


def expert_parameters(spec: ModelSpec) -> int:
    """Elements of all experts; 0 in a dense model."""
    count = 0 if spec.experts is None else spec.experts.count
    return spec.num_layers * count * 3 * spec.hidden_size * spec.ffn_size


def other_parameters(spec: ModelSpec) -> int:
    """Elements of embeddings, output layer, norms, biases and routers."""
    per_layer = 2 * spec.hidden_size
    per_layer += 0 if spec.experts is None else spec.experts.count * spec.hidden_size
    per_layer += 2 * spec.head_dim if spec.qk_norm else 0
    per_layer += (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim if spec.qkv_bias else 0
    vocabulary = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    return spec.num_layers * per_layer + vocabulary + spec.hidden_size


def num_parameters(spec: ModelSpec) -> int:
    """Elements of the whole model; a tied output layer counts once."""
    return linear_parameters(spec) + other_parameters(spec)


def weight_bytes(spec: ModelSpec, weight_format: WeightFormat) -> int:
    """Bytes of one copy of all weights in the engines' format."""
    return sum(tensor.num_bytes for tensor in wire_tensors(spec, weight_format))


def kv_bytes_per_token(spec: ModelSpec, tensor_parallel: int) -> int:
    """Bytes of keys and values that one engine rank holds for one token, in bfloat16."""
    return 2 * 2 * spec.num_layers * -(-spec.num_kv_heads // tensor_parallel) * spec.head_dim


def trainer_rank(spec: ModelSpec, trainer: TrainerConfig, *, longest_sample: int) -> Sequence[MemoryItem]:
    """Memory of the largest trainer rank; `longest_sample` in tokens, prompt and response.

    Activations are those of the first pipeline stage, which keeps one micro batch in flight per stage.
    """
    parallel = trainer.parallel
    width = 2 if trainer.dtype == "bf16" else 4
    spread = expert_parameters(spec) * (parallel.expert - 1) // parallel.expert
    linear_shard = -(-(linear_parameters(spec) - spread) // (parallel.tensor * parallel.pipeline))
    shard = -(-(num_parameters(spec) - spread) // (parallel.tensor * parallel.pipeline))
    optimizer_shard = -(-shard // parallel.data) if trainer.optimizer.distributed else shard
    masters = 4 if trainer.dtype == "bf16" else 0
    tokens = max(trainer.max_micro_batch_tokens, longest_sample)
    chunk = min(trainer.logprob_chunk_tokens, tokens)
    logits = 3 * 4 * chunk * -(-spec.vocab_size // parallel.tensor)
    return (
        MemoryItem(
            what="parameters",
            num_bytes=shard * width + _fp8_bytes(trainer.fp8, linear_shard),
            knob="trainer.parallel.tensor",
        ),
        MemoryItem(what="gradients", num_bytes=shard * 4, knob="trainer.parallel.tensor"),
        MemoryItem(what="optimizer", num_bytes=optimizer_shard * (8 + masters), knob="trainer.optimizer.distributed"),
        MemoryItem(
            what="activations",
            num_bytes=_activations(spec, trainer, tokens, width),
            knob="trainer.max_micro_batch_tokens",
        ),
        MemoryItem(what="logits", num_bytes=logits, knob="trainer.logprob_chunk_tokens"),
    )


def _fp8_bytes(fp8: Fp8, num_linear: int) -> int:
    """Bytes that FP8 adds to BF16 parameters: codes by rows and by columns, and a scale for each block of both.

    `blockwise` keeps these codes in addition to BF16 parameters; `blockwise_param` keeps them instead.
    """
    if fp8 == "none":
        return 0
    scales = 2 * 4 * -(-num_linear // FP8_BLOCK**2)
    return scales + (2 * num_linear if fp8 == "blockwise" else 0)


def _activations(spec: ModelSpec, trainer: TrainerConfig, tokens: int, width: int) -> int:
    """Bytes kept for the backward pass: all layers, or with full recomputation all layer inputs and one layer."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    networks = 1 if spec.experts is None else spec.experts.per_token
    layer = 5 * spec.hidden_size + heads + 3 * networks * spec.ffn_size
    if trainer.recompute == "full":
        elements = spec.num_layers * spec.hidden_size + layer
    else:
        elements = spec.num_layers * layer
    return tokens * elements * width // trainer.parallel.tensor


def engine_rank(
    spec: ModelSpec, *, weight_format: WeightFormat, tensor_parallel: int, kv_cache_bytes: int
) -> Sequence[MemoryItem]:
    """Memory of one engine rank."""
    weights = -(-weight_bytes(spec, weight_format) // tensor_parallel)
    return (
        MemoryItem(what="weights", num_bytes=weights, knob="engine.tensor_parallel"),
        MemoryItem(what="keys and values", num_bytes=kv_cache_bytes, knob="engine.kv_cache_bytes"),
    )
