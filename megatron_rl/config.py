"""Configuration of the trainer, the algorithm, publishing and checkpoints."""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from history.config import Config
from megatron_rl.built_in import ADVANTAGES, LOSSES, BuiltIns
from rollout.config import InFlight

Fp8 = Literal["none", "blockwise", "blockwise_param"]
"""What of the trainer's decoder layers is FP8: nothing, matrix products, or their weights too."""


class ParallelConfig(Config):
    """How the trainer is cut over its ranks; the world is tensor x pipeline x data."""

    tensor: int = Field(default=1, gt=0)
    """Tensor-parallel size; sequence parallelism is on when it is above 1."""
    pipeline: int = Field(default=1, gt=0)
    """Pipeline-parallel size."""
    data: int = Field(default=1, gt=0)
    """Data-parallel size."""
    expert: int = Field(default=1, gt=0)
    """Data-parallel ranks over which the experts of a layer are spread; divides `data`."""

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.tensor * self.pipeline * self.data


class OptimizerConfig(Config):
    """Adam and its schedule; one optimizer step per mini batch."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Where the decay ends."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer steps until `min_learning_rate`; 0 means the whole run."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """First moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's denominator."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient norm is clipped to this; 0 turns clipping off."""
    distributed: bool = False
    """Megatron's distributed optimizer: states are sharded over data-parallel ranks."""


class TrainerConfig(Config):
    """The Megatron trainer."""

    parallel: ParallelConfig = ParallelConfig()
    """Tensor, pipeline and data parallelism."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of parameters and matmuls; the optimizer keeps FP32 masters either way."""
    fp8: Fp8 = "none"
    """FP8 in the decoder layers' matrix products, with a scale for each 128 x 128 weights (Transformer Engine's block
    scaling); GPUs from compute capability 9.0 on. `blockwise`: parameters stay BF16 and are quantised for the products.
    `blockwise_param`: the parameters themselves are FP8, beside FP32 masters; needs `optimizer.distributed`, and
    `engine.format=fp8_block` then sends their codes as they are where blocks agree."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam and its schedule."""
    max_micro_batch_tokens: int = Field(default=8192, gt=0)
    """Prompt plus response tokens of one forward; a longer sample is alone in its micro batch."""
    attention_parity_tokens: int = Field(default=0, ge=0)
    """Length at which attention costs as much as the linear layers, by which micro batches are balanced; 0: counted
    from the architecture. Without a pipeline, steps report what was measured (`perf/attention_parity_tokens`)."""
    logprob_chunk_tokens: int = Field(default=1024, gt=0)
    """Tokens whose vocabulary logits exist at one time."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What moves to host memory while engines sample; GPUs only. `optimizer`: gradients, masters and moments. `all`:
    the weights too."""
    cpu_threads: int = Field(default=1, gt=0)
    """Threads per rank; CPU only."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """A call that has not returned from every rank by then kills the group, naming the late ranks."""
    megatron: dict[str, str | int | float | bool] = {}
    """Further fields of Megatron's `TransformerConfig`, passed as they are and checked by its own class."""


class RejectionConfig(Config):
    """One hard trust region on a divergence between trainer and sampler, with lr = old_logprobs - rollout_logprobs:
    k1 = -lr, k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr.
    """

    statistic: Literal[
        "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    ]  # fmt: skip
    """Per token, or the sum, mean or maximum over a sequence, which then stays or goes as a whole."""
    high: float = Field(gt=0)
    """k2, k3: largest value that is kept (0.01 is usual for `seq_mean_k3`). k1: largest exp(k1), a ratio."""
    low: float = Field(default=0.0, ge=0)
    """k1 only: smallest exp(k1) that is kept; 0 means 1 / high."""


class CorrectionConfig(Config):
    """What repairs the gap between the quantised sampler and the trainer."""

    mode: Literal["none", "tis_token", "tis_sequence", "icepop", "icepop_sequence", "mis_product", "mis_geometric"] = (
        "tis_token"
    )
    """Importance weights: truncated per token or per sequence; IcePop keeps a band; MIS masks whole sequences."""
    cap: float = Field(default=2.0, gt=0)
    """C of truncated importance sampling; the upper end of a band."""
    low: float = Field(default=0.5, ge=0)
    """Lower end of a band (`icepop`, `mis_*`)."""
    veto_ratio: float = Field(default=0.0, ge=0)
    """Drop a sequence that holds a token with a ratio below this (1e-4 is usual); 0 turns it off. Counted."""
    batch_normalize: bool = False
    """Divide weights by their mean over the step."""
    rejections: tuple[RejectionConfig, ...] = ()
    """Hard trust regions; what fails any of them takes no part in the loss. Counted."""


class AlgorithmConfig(Config):
    """What is learned from a scored group."""

    group_size: int = Field(default=8, gt=0)
    """G: responses per prompt."""
    prompts_per_step: int = Field(default=64, gt=0)
    """Groups of one step."""
    num_mini_batches: int = Field(default=1, gt=0)
    """Mini batches of one epoch over the step's samples."""
    num_epochs: int = Field(default=1, gt=0)
    """Passes over the step's samples; optimizer steps of a step = `num_epochs x num_mini_batches`."""
    loss: str = "clipped_surrogate"
    """Policy loss: `clipped_surrogate`, `gspo` or `cispo`, or the dotted path of your own function."""
    advantage: str = "grpo"
    """Advantage: `grpo`, `dr_grpo`, `rloo` or `dapo`, or the dotted path of your own function."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all tokens of the mini batch, or mean over sequences of their token means."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped from above at 1 + clip_high (DAPO: 0.28)."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Bounds the loss of tokens with a negative advantage at this many times its size (3 is usual); 0 turns it off."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the mean token entropy."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal: they carry no gradient (counted)."""
    mask_truncated: bool = False
    """Overlong masking: responses cut by the token limit take no part in the loss (counted)."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Read by `dapo`: a punishment grows linearly over the last so many tokens before the limit; 0 turns it off."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Read by `dapo`: the punishment at the limit, in units of reward."""
    correction: CorrectionConfig = CorrectionConfig()
    """Truncated importance sampling and its family."""

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, value: str) -> str:
        return _known(value, LOSSES)

    @field_validator("advantage")
    @classmethod
    def _check_advantage(cls, value: str) -> str:
        return _known(value, ADVANTAGES)


def _known(value: str, built_ins: BuiltIns) -> str:
    """`value`, unless it can be no name of a function."""
    if problem := built_ins.problem(value):
        raise PydanticCustomError("function_name", "{problem}", {"problem": problem})
    return value


class PublishConfig(Config):
    """How weights reach the engines."""

    transport: Literal["auto", "shm", "gloo", "nccl", "cuda_ipc"] = "auto"
    """`shm` and `gloo` go through the host; `cuda_ipc` hands weights over on each device, after trainer ranks have
    exchanged them over NCCL; `nccl` sends from device to device where engines have their own (`placement.mode`).
    `auto`: `nccl` there; else, in a Ray that the run starts, `cuda_ipc` where every engine shares its devices with
    trainer ranks, and `shm` where one does not; `gloo` in a cluster that it joins, and with `delta`."""
    bucket_bytes: int = Field(default=64 << 20, gt=0)
    """Upper bound of a bucket; a layer's piece that is larger has a bucket of its own."""
    probe_tokens: int = Field(default=32, gt=1)
    """Length of the fixed prompt that every publish is proven with."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of one publish; whoever is late is named."""
    in_flight: InFlight = "recompute"
    """What becomes of responses that run when new weights come. `recompute`: their keys and values are computed anew.
    `keep_kv`: they go on at once with keys and values of the old weights, which no later response shares; their
    log-probabilities are what was sampled from, but the trainer cannot recompute them. `drain`: none begins, and those
    that run are waited for."""
    drain_timeout_s: float = Field(default=3600.0, gt=0)
    """How long `drain` waits for the longest response."""
    delta: bool = False
    """Send only what has changed since the last publish. Costs a copy of the 8-bit weights at the trainer and one on
    every node with engines, or on each of their devices (`nccl`); not for `shm`, which moves nothing."""
    delta_full_every: int = Field(default=20, ge=0)
    """With `delta`, every so many publishes send everything all the same; 0 for the first only."""


class CheckpointConfig(Config):
    """Checkpoints of a run."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 means only after the last step."""
    keep_last: int = Field(default=2, gt=0)
    """Older ones are removed once a newer one is complete."""
