"""Memory estimates of trainer ranks and engine ranks, before they start.

Parameters, gradients and optimizer states are exact (`megatron_rl.weights.state_sizes`), and so are the weights and the
KV cache of an engine. Activations (`megatron_rl.activations`), logits and workspaces are estimates from the shapes of
the tensors that the code keeps; fragmentation is not counted.

Invariants: parameter counts are exact for the supported families (a test compares with transformers). Every item
grows with the key that it names. Pure: imports neither torch nor megatron.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron_rl.activations import Kernels, activation_bytes, micro_batch_tokens, score_bytes
from megatron_rl.config import OptimizerConfig, TrainerConfig
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.reshard_plan import wire_tensors
from megatron_rl.weights.state_sizes import critic_state, rank_state
from rollout.config import GPU_LOGITS_AT_ONCE, EngineConfig, KvFormat
from rollout.weights.format import WeightFormat

TRAINER_PROCESS_BYTES = 700 << 20
"""A Python process with torch, Megatron and a gloo group, no model; an estimate."""
ENGINE_PROCESS_BYTES = 1500 << 20
"""The two processes of an AsyncLLM engine without weights and KV cache. Each further rank adds half of it."""

SCORES = "attention scores"
"""Name of the item of unfused attention."""
GRAPHS = "CUDA graphs"
"""Name of the item that a sleeping engine keeps."""
GRAPH_BYTES = 1 << 30
"""CUDA graphs of one engine rank, without attention's partial sums; an estimate."""
ATTENTION_SPLITS = 32
"""Parts of each text for which attention has partial sums (vLLM's `flash_attn_max_num_splits_for_cuda_graph`)."""

PACKED_TOKEN_BYTES, PREPARED_TOKEN_BYTES = 49, 25
"""Of a response token of a step on its rank: as it is packed, and at most what prepared columns add to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One use of memory."""

    what: str
    num_bytes: int
    knob: str
    """The configuration key that shrinks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherSpecs:
    """Architectures of the models that an algorithm needs beside the policy; None where it needs none."""

    critic: ModelSpec | None = None
    reference: ModelSpec | None = None


NO_FURTHER = FurtherSpecs()
FURTHER_STATE = ("critic parameters", "critic gradients", "critic optimizer", "reference parameters")
"""Items of further models that a trainer rank holds between and during steps."""


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


@cache
def weight_bytes(spec: ModelSpec, weight_format: WeightFormat) -> int:
    """Bytes of one copy of all weights in the engines' format."""
    return sum(tensor.num_bytes for tensor in wire_tensors(spec, weight_format))


def kv_bytes_per_token(spec: ModelSpec, tensor_parallel: int, kv_format: KvFormat = "bf16") -> int:
    """Bytes of keys and values that one engine rank holds for one token."""
    width = 1 if kv_format == "fp8" else 2
    return 2 * width * spec.num_layers * -(-spec.num_kv_heads // tensor_parallel) * spec.head_dim


def checkpoint_bytes(spec: ModelSpec, trainer: TrainerConfig, further: FurtherSpecs = NO_FURTHER) -> int:
    """Bytes of one checkpoint: parameters (FP8 ones as BF16), and FP32 masters and moments, each once.

    The critic's are added, and the parameters of a reference policy that is refreshed.
    """
    width = 2 if trainer.dtype == "bf16" else 4
    saved = num_parameters(spec) * (width + _optimizer_width(trainer, trainer.optimizer))
    if further.critic is not None:
        trunk = num_parameters(replace(further.critic, tied=True)) + further.critic.hidden_size
        saved += trunk * (width + _optimizer_width(trainer, trainer.critic.optimizer))
    if further.reference is not None and trainer.reference.refresh_every:
        saved += num_parameters(further.reference) * width
    return saved


def _optimizer_width(trainer: TrainerConfig, optimizer: OptimizerConfig) -> int:
    """Bytes of masters and moments of one parameter."""
    return 12 if trainer.dtype == "bf16" or optimizer.distributed else 8


def trainer_rank(
    spec: ModelSpec,
    trainer: TrainerConfig,
    *,
    longest_sample: int,
    step_tokens: int = 0,
    further: FurtherSpecs = NO_FURTHER,
    kernels: Kernels = "fused",
) -> Sequence[MemoryItem]:
    """Memory of the trainer rank that has most in all; arguments are those of `trainer_stages`."""
    return largest(
        trainer_stages(
            spec, trainer, longest_sample=longest_sample, step_tokens=step_tokens, further=further, kernels=kernels
        )
    )


def largest(stages: Sequence[Sequence[MemoryItem]]) -> Sequence[MemoryItem]:
    """The items with most bytes in all; none of no stages."""
    return max(stages, key=lambda items: sum(item.num_bytes for item in items), default=())


def trainer_stages(
    spec: ModelSpec,
    trainer: TrainerConfig,
    *,
    longest_sample: int,
    step_tokens: int = 0,
    further: FurtherSpecs = NO_FURTHER,
    kernels: Kernels = "fused",
) -> Sequence[Sequence[MemoryItem]]:
    """Memory of a trainer rank of each pipeline stage. Stages may need most in different phases.

    Args:
        spec: the policy's architecture.
        trainer: the trainer's configuration.
        longest_sample: tokens of prompt and response.
        step_tokens: tokens of all samples of a step; every data-parallel rank holds its share of them.
        further: models beside the policy.
        kernels: kernels of the trainer's layers.
    """
    stages = []
    for pipeline_rank in range(trainer.parallel.pipeline):
        items = [
            *_state_items(spec, trainer, pipeline_rank),
            *_pass_items((spec, further.critic), trainer, pipeline_rank, longest_sample, kernels),
            *_output_items(spec, trainer, pipeline_rank, micro_batch_tokens(trainer, longest_sample)),
        ]
        stages.append([*items, *_further_items(trainer, pipeline_rank, further)])
    of_step = (PACKED_TOKEN_BYTES + PREPARED_TOKEN_BYTES) * step_tokens // trainer.parallel.data
    step = MemoryItem(what="samples of a step", num_bytes=of_step, knob="sampling.max_response_tokens")
    return [[*items, step] if of_step else items for items in stages]


def _state_items(spec: ModelSpec, trainer: TrainerConfig, pipeline_rank: int) -> Sequence[MemoryItem]:
    """State of the policy on a rank of one pipeline stage."""
    state = rank_state(spec, trainer, pipeline_rank=pipeline_rank)
    return (
        MemoryItem(what="parameters", num_bytes=state.parameters, knob="trainer.parallel.tensor"),
        MemoryItem(what="gradients", num_bytes=state.gradients, knob="trainer.parallel.tensor"),
        MemoryItem(what="optimizer", num_bytes=state.optimizer_bytes, knob="trainer.optimizer.distributed"),
    )


def _pass_items(
    models: Iterable[ModelSpec | None],
    trainer: TrainerConfig,
    pipeline_rank: int,
    longest_sample: int,
    kernels: Kernels,
) -> Sequence[MemoryItem]:
    """What forward and backward passes of one pipeline stage keep. Policy and critic learn one after the other, so the
    one with more counts; the values of a micro batch are small.
    """
    learners = [spec for spec in models if spec is not None]
    tokens, knob = micro_batch_tokens(trainer, longest_sample), "trainer.max_micro_batch_tokens"
    activations = max(
        activation_bytes(spec, trainer, pipeline_rank=pipeline_rank, tokens=tokens, kernels=kernels)
        for spec in learners
    )
    items = [MemoryItem(what="activations", num_bytes=activations, knob=knob)]
    if kernels == "unfused":
        scores = max(
            score_bytes(spec, trainer, pipeline_rank=pipeline_rank, longest_sample=longest_sample) for spec in learners
        )
        items.append(MemoryItem(what=SCORES, num_bytes=scores, knob=knob))
    return items


def _output_items(spec: ModelSpec, trainer: TrainerConfig, pipeline_rank: int, tokens: int) -> Sequence[MemoryItem]:
    """Logits and gradient of the output layer, which the last pipeline stage computes."""
    tensor = trainer.parallel.tensor
    if pipeline_rank != trainer.parallel.pipeline - 1:
        return ()
    rows = spec.padded_vocab_size(tensor) // tensor
    chunk = min(trainer.logprob_chunk_tokens, tokens)
    width = 2 if trainer.dtype == "bf16" else 4
    return (
        MemoryItem(what="logits", num_bytes=3 * 4 * chunk * rows, knob="trainer.logprob_chunk_tokens"),
        MemoryItem(
            what="output gradient",
            num_bytes=(4 + width) * rows * spec.hidden_size + 3 * width * tokens * spec.hidden_size,
            knob="trainer.parallel.tensor",
        ),
    )


def _further_items(trainer: TrainerConfig, pipeline_rank: int, further: FurtherSpecs) -> Sequence[MemoryItem]:
    """State of the further models on a rank of one pipeline stage."""
    found: list[MemoryItem] = []
    if (critic := further.critic) is not None:
        state = critic_state(critic, trainer, pipeline_rank=pipeline_rank)
        distributed = "trainer.critic.optimizer.distributed"
        found += [
            MemoryItem(what="critic parameters", num_bytes=state.parameters, knob="trainer.parallel.tensor"),
            MemoryItem(what="critic gradients", num_bytes=state.gradients, knob="trainer.parallel.tensor"),
            MemoryItem(what="critic optimizer", num_bytes=state.optimizer_bytes, knob=distributed),
        ]
    if further.reference is not None and trainer.reference.place == "device":
        num_bytes = rank_state(further.reference, trainer, pipeline_rank=pipeline_rank).parameters
        found.append(MemoryItem(what="reference parameters", num_bytes=num_bytes, knob="trainer.reference.place"))
    return found


def engine_rank(
    spec: ModelSpec, engine: EngineConfig, *, draft_tokens: int = 0, on_gpu: bool = False
) -> Sequence[MemoryItem]:
    """Memory of one engine rank, which verifies up to `draft_tokens` drafted tokens a request.

    The workspace holds the hidden states, query, key, value and feed-forward halves of one forward; an estimate. On a
    CPU logits are FP32: as computed, scaled, and normalised (`processed_logprobs`). Only rows that are sampled have
    logits.

    On a GPU attention's partial sums (`split_bytes`) exist twice. The workspace has those of forwards whose attention
    runs between graphs; whole graphs, of up to a full draft of every request, have their own.
    """
    tensor = engine.tensor_parallel
    weights = -(-weight_bytes(spec, WeightFormat.of(engine)) // tensor)
    tokens = engine.forward_tokens(draft_tokens)
    networks = 1 if spec.experts is None else spec.experts.per_token
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    elements = 3 * spec.hidden_size + (heads + 3 * networks * spec.ffn_size) // tensor
    full = engine.max_num_seqs * (1 + draft_tokens)
    rows = min(full, tokens)
    workspace, logits = 2 * tokens * elements, 3 * 4 * rows * spec.vocab_size
    graphs: tuple[MemoryItem, ...] = ()
    if on_gpu:
        captured = engine.graph_tokens(draft_tokens)
        workspace += split_bytes(spec, engine, captured)
        logits = gpu_logits_bytes(spec, engine, rows)
        num_bytes = GRAPH_BYTES + split_bytes(spec, engine, min(captured, full)) if captured else 0
        graphs = (MemoryItem(what=GRAPHS, num_bytes=num_bytes, knob="engine.vllm.enforce_eager"),)
    return (
        MemoryItem(what="weights", num_bytes=weights, knob="engine.tensor_parallel"),
        MemoryItem(what="keys and values", num_bytes=engine.kv_cache_bytes, knob="engine.kv_cache_bytes"),
        MemoryItem(what="workspace", num_bytes=workspace, knob="engine.vllm.max_num_batched_tokens"),
        MemoryItem(what="logits", num_bytes=logits, knob="engine.max_num_seqs"),
        *graphs,
    )


def split_bytes(spec: ModelSpec, engine: EngineConfig, tokens: int) -> int:
    """Bytes of attention's partial sums in a forward of `tokens` tokens: FP32 [splits, heads of a rank, tokens, head].

    FlashAttention 3 allocates them in every forward of up to the largest graph's tokens, in graphs or between them: in
    vLLM 0.25.1 `v1/attention/backends/flash_attn.py`, lines 399 and 472, with 32 splits (`config/attention.py`, line
    30). Only GPUs of compute capability 9 use FlashAttention 3; the bytes are counted on every GPU.
    """
    return 4 * ATTENTION_SPLITS * spec.num_heads * tokens * spec.head_dim // engine.tensor_parallel


def gpu_logits_bytes(spec: ModelSpec, engine: EngineConfig, rows: int) -> int:
    """Bytes of the logits of `rows` rows on a GPU, and of the sampler's block; an estimate.

    Logits are BF16. Tensor parallelism adds a rank's share and a copy in the order of ranks (in vLLM 0.25.1
    `distributed/device_communicators/base_device_communicator.py`, line 204). `rollout.worker.sampler` has three FP32
    copies of a block: scaled, as probabilities, and for greedy requests. vLLM's own sampler has three of a row of each
    request, when the engine warms up (`v1/worker/gpu_worker.py`, line 860) and for requests that need it.
    """
    tensor, own = engine.tensor_parallel, 2 * rows * spec.vocab_size
    copies = own if tensor == 1 else 2 * own + own // tensor
    block = 3 * 4 * min(rows * spec.vocab_size, GPU_LOGITS_AT_ONCE)
    return max(copies + block, 3 * 4 * min(engine.max_num_seqs, rows) * spec.vocab_size)
