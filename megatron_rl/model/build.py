"""Builds the Megatron model; the only file that knows Megatron's version and its model classes.

`build` returns this rank's part of the policy as a list of model chunks.
A chunk is a Megatron `GPTModel` whose last stage returns token scores instead of logits
(`megatron_rl.model.logprobs`), so logits of the whole batch never exist.

Rules for callers:

* Every pipeline stage calls `chunk(batch, temperature=t)` with the same `PackedBatch` on this rank's device. Megatron's
  schedules pass hidden states between stages (variable lengths are on). The last stage returns `TokenScores`, all
  others return hidden states.
* With sequence parallelism (on if tensor > 1) rows must be a multiple of the tensor-parallel size:
  `pack_batch(..., multiple_of=parallel.tensor)`.
* `calculate_per_token_loss` is on: the loss function of a schedule returns (loss, number of tokens, metrics), and
  nothing is divided by the number of micro batches.
* After backward, Megatron's `finalize_model_grads` sums gradients that tensor-parallel ranks hold in parts (norms under
  sequence parallelism, q/k norms always) and those of the two copies of a tied embedding.
* `overlap_param_gather` of Megatron's DDP stays off: the output layer's weight is read without calling the layer, so
  nothing would wait for its gather.

Layers are Transformer Engine's on CUDA, and Megatron's local ones with our norm and attention elsewhere.
`megatron_rl.model.fp8_compute` holds the requirements of FP8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import Fp8, ParallelConfig
from megatron_rl.model import fp8_compute
from megatron_rl.model.attention import PackedAttention
from megatron_rl.model.logprobs import TokenScores, token_scores, vocab_shard
from megatron_rl.model.norm import RMSNorm
from megatron_rl.model.packed_batch import PackedBatch
from megatron_rl.model.parallel import Position, device
from megatron_rl.model.rotary import rotate_packed, scaled_frequencies
from megatron_rl.model.spec import Experts, ModelSpec, stage_layers

Dtype = Literal["bf16", "fp32"]
Recompute = Literal["none", "selective", "full"]
LayerNames = Literal["te", "local"]

INITIAL_STD = 0.02
"""Standard deviation of random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is built, beside its architecture and its partition."""

    dtype: Dtype
    fp8: Fp8 = "none"
    recompute: Recompute = "none"
    chunk_tokens: int = 1024
    """Tokens whose logits exist at one time."""
    sequence_parallel: bool | None = None
    """None: on if the tensor-parallel size is above 1."""
    random_weights: bool = False
    """Otherwise weights are uninitialised: load them (`megatron_rl.weights.hf_load`)."""
    megatron: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Further fields of Megatron's `TransformerConfig`."""


class PackedModel(GPTModel):  # type: ignore[misc]
    """One chunk of a GPTModel over packed batches, which ends in hidden states."""

    def __init__(
        self, spec: ModelSpec, config: TransformerConfig, *, parallel: ParallelConfig, position: Position
    ) -> None:
        """Build the layers of `position`'s pipeline stage."""
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(config),
            vocab_size=spec.padded_vocab_size(parallel.tensor),
            max_sequence_length=spec.max_positions,
            pre_process=position.pipeline == 0,
            post_process=position.pipeline == parallel.pipeline - 1,
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
        )
        self.spec = spec
        if spec.rope_scaling is not None:
            self.rotary_pos_emb.inv_freq = scaled_frequencies(self.rotary_pos_emb.inv_freq, spec.rope_scaling)
        self._move(device())

    def _move(self, to: torch.device) -> None:
        """Move what is elsewhere: Megatron makes routers of experts in host memory. FP8 parameters stay as they are."""
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.device != to:
                tensor.data = tensor.data.to(to)

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Hidden states [T, 1, H], rows sharded under sequence parallelism; of the last stage after the final norm."""
        hidden: torch.Tensor = super().forward(
            input_ids=batch.tokens[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            packed_seq_params=_packed_seq_params(batch),
        )
        # Megatron would keep the angles of the last 32 lengths on the device, also while engines use the device
        RotaryEmbedding.forward.cache_clear()
        return hidden

    def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Return hidden states; GPTModel would compute logits here."""
        return hidden_states


class PolicyModel(PackedModel):
    """One chunk of the policy, which ends in token scores."""

    def __init__(
        self,
        spec: ModelSpec,
        config: TransformerConfig,
        *,
        parallel: ParallelConfig,
        position: Position,
        chunk_tokens: int,
    ) -> None:
        """Build the layers of `position`'s pipeline stage; at most `chunk_tokens` tokens have logits at one time."""
        super().__init__(spec, config, parallel=parallel, position=position)
        self._chunk_tokens = chunk_tokens

    def forward(self, batch: PackedBatch, *, temperature: float | None = None) -> torch.Tensor | TokenScores:
        """Hidden states before the last stage, scores on it; without a temperature, hidden states on all stages."""
        hidden = self.hidden(batch)
        if temperature is None or not self.post_process:
            return hidden
        return self.scores(hidden, batch, temperature=temperature)

    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, [V, H], padding included; last stage only."""
        weight: torch.Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return weight

    def scores(self, hidden: torch.Tensor, batch: PackedBatch, *, temperature: float) -> TokenScores:
        """Scores of the batch's response tokens from the last stage's hidden states."""
        group = self.pg_collection.tp
        gather = (
            gather_from_sequence_parallel_region
            if self.config.sequence_parallel
            else copy_to_tensor_model_parallel_region
        )
        rows_TH = gather(hidden, group=group)[:, 0]
        weight_VH = self.output_weight()
        return token_scores(
            rows_TH.index_select(0, batch.score_rows),
            weight_VH,
            batch.targets,
            shard=vocab_shard(
                vocab_size=self.spec.vocab_size,
                num_rows=len(weight_VH),
                tensor_rank=group.rank(),
                group=group if group.size() > 1 else None,
            ),
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
        )


def _packed_seq_params(batch: PackedBatch) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def layer_names() -> LayerNames:
    """Layer implementation of `build` on this machine, which decides parameter names."""
    return "te" if torch.cuda.is_available() and find_spec("transformer_engine") is not None else "local"


def build(
    spec: ModelSpec,
    parallel: ParallelConfig,
    position: Position,
    options: ModelOptions,
) -> list[PolicyModel]:
    """Build the model chunks of this rank, on its device, in train mode; every rank of the partition calls it.

    Raises:
        ValueError: this machine has no kernels for `options.fp8`.
    """
    config = prepare(spec, parallel, options)
    model = PolicyModel(spec, config, parallel=parallel, position=position, chunk_tokens=options.chunk_tokens)
    fp8_compute.check_parameters(model, options.fp8)
    return [model]


def prepare(spec: ModelSpec, parallel: ParallelConfig, options: ModelOptions) -> TransformerConfig:
    """Check this machine, choose its kernels, and return Megatron's configuration of the model.

    `deterministic_mode` also turns on torch's deterministic algorithms, which Megatron's experts ask for. An operation
    that has none warns in the rank's log.

    Raises:
        ValueError: this machine has no kernels for `options.fp8`.
    """
    fp8_compute.check_machine(options.fp8)
    if layer_names() == "local":
        rope_utils.fused_apply_rotary_pos_emb_thd = rotate_packed
    config = transformer_config(spec, parallel, options)
    torch.use_deterministic_algorithms(config.deterministic_mode, warn_only=True)
    # on by default in that mode; nothing here reads what it has not written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return config


def transformer_config(spec: ModelSpec, parallel: ParallelConfig, options: ModelOptions) -> TransformerConfig:
    """Megatron's configuration of the model."""
    derived = {
        **_architecture(spec),
        **_partition(spec, parallel, sequence_parallel=options.sequence_parallel),
        **_numbers(options.dtype, random_weights=options.random_weights),
        **fp8_compute.config_fields(options.fp8),
    }
    return TransformerConfig(**{**derived, **_kernels(), **_recompute(options.recompute), **_further(options.megatron)})


def _architecture(spec: ModelSpec) -> dict[str, object]:
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn_size,
        "layernorm_epsilon": spec.rms_eps,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **(_experts(spec.experts) if spec.experts is not None else {}),
    }


def _experts(experts: Experts) -> dict[str, object]:
    """Router: softmax over all experts, then top-k; with normalised probabilities, softmax over the top-k."""
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_score_function": "softmax",
        # an auxiliary loss would change the policy's objective
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": layer_names() == "te",
    }


def _partition(spec: ModelSpec, parallel: ParallelConfig, *, sequence_parallel: bool | None) -> dict[str, object]:
    stages = stage_layers(spec.num_layers, parallel.pipeline)
    uneven = len({len(stage) for stage in stages}) > 1
    layout = [["decoder"] * len(stage) for stage in stages]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.tensor,
        "pipeline_model_parallel_layout": layout if uneven else None,
        "sequence_parallel": parallel.tensor > 1 if sequence_parallel is None else sequence_parallel,
        "variable_seq_lengths": True,
        # Checked against variable lengths even where there are no experts.
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
    }


def _numbers(dtype: Dtype, *, random_weights: bool) -> dict[str, object]:
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    # Megatron marks tensor-parallel parameters (the gradient norm needs the mark) only while it initialises them, so
    # "uninitialised" is an initialiser that does nothing.
    initialise = _normal if random_weights else _leave
    return {
        "params_dtype": torch_dtype,
        "pipeline_dtype": torch_dtype,
        "bf16": dtype == "bf16",
        "init_method": initialise,
        "output_layer_init_method": initialise,
        "perform_initialization": True,
    }


def _normal(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(weight, std=INITIAL_STD)


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _kernels() -> dict[str, object]:
    """Fused kernels and point-to-point mode of this machine; `trainer.megatron` may override them."""
    te = layer_names() == "te"
    return {
        "bias_activation_fusion": te,
        "bias_dropout_fusion": te,
        "apply_rope_fusion": True,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        # gloo confuses batched sends and receives between the same two ranks
        "batch_p2p_comm": torch.cuda.is_available(),
        "deallocate_pipeline_outputs": True,
    }


def _recompute(recompute: Recompute) -> dict[str, object]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {}


def _further(fields: Mapping[str, str | int | float | bool]) -> dict[str, object]:
    """Fields of `trainer.megatron`, without `deterministic_mode` on a CPU.

    Operations repeat their bits there, but not the one that Megatron's mode uses for the embedding: several threads add
    the gradients of an indexed FP32 tensor in any order.
    """
    on_cuda = torch.cuda.is_available()
    return {name: value for name, value in fields.items() if on_cuda or name != "deterministic_mode"}


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Transformer Engine's layers, or Megatron's local ones with our norm and attention."""
    if layer_names() == "te":
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = RMSNorm
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        attention = layer.submodules.self_attention.submodules
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention.q_layernorm = attention.k_layernorm = RMSNorm if config.qk_layernorm else IdentityOp
        attention.core_attention = PackedAttention
    return block
