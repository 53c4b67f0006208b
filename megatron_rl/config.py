"""Configuration of the trainer, the algorithm, publishing and checkpoints."""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from history.config import Config
from megatron_rl.built_in import ADVANTAGES, LOSSES, BuiltIns
from megatron_rl.passthrough import passthrough_problem
from rollout.config import InFlight

Aggregation = Literal["token_mean", "sequence_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
"""How the losses of tokens become the loss of a mini batch."""

Fp8 = Literal["none", "blockwise", "blockwise_param"]
"""FP8 in the trainer's decoder layers: none, matrix products only, or matrix products and parameters."""


class ParallelConfig(Config):
    """Partition of the trainer over its ranks. The world size is tensor x pipeline x data."""

    tensor: int = Field(default=1, gt=0)
    """Tensor-parallel size. Sequence parallelism is on if it is above 1."""
    pipeline: int = Field(default=1, gt=0)
    """Pipeline-parallel size."""
    data: int = Field(default=1, gt=0)
    """Data-parallel size."""
    expert: int = Field(default=1, gt=0)
    """Expert-parallel size: experts of a layer are spread over this many data-parallel ranks. Must divide `data`."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.pipeline * self.data


class OptimizerConfig(Config):
    """Adam and its learning-rate schedule. Each mini batch makes one optimizer step."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer steps until `min_learning_rate` is reached. 0 means the whole run, whose last update is the last one
    above `min_learning_rate`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam's update."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Upper bound of the global gradient norm. 0 turns clipping off."""
    distributed: bool = False
    """Use Megatron's distributed optimizer, which shards its states over data-parallel ranks."""


class TrainerConfig(Config):
    """The Megatron trainer."""

    parallel: ParallelConfig = ParallelConfig()
    """Tensor, pipeline and data parallelism."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of parameters and matrix products. The optimizer always keeps FP32 master weights."""
    fp8: Fp8 = "none"
    """FP8 matrix products in decoder layers, with one scale for each block of 128 x 128 weights (Transformer Engine's
    block scaling). Needs a GPU of compute capability 9.0 or above. `blockwise`: parameters stay BF16 and are quantised
    for each product. `blockwise_param`: parameters are FP8, with FP32 master weights; needs `optimizer.distributed`.
    With `engine.format=fp8_block` it publishes FP8 codes without requantising them where the blocks agree."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam and its learning-rate schedule."""
    max_micro_batch_tokens: int = Field(default=8192, gt=0)
    """Most prompt and response tokens of one micro batch. A longer sample gets a micro batch of its own."""
    attention_parity_tokens: int = Field(default=0, ge=0)
    """Sequence length at which attention costs as much as the linear layers. Micro batches are balanced by it.
    0 derives it from the architecture. Without a pipeline, `perf/attention_parity_tokens` reports measurements."""
    logprob_chunk_tokens: int = Field(default=1024, gt=0)
    """Logits over the vocabulary are computed for this many tokens at a time."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Trainer state that moves to host memory while engines sample. GPUs only. `optimizer`: gradients, master weights
    and moments. `all`: the weights as well."""
    cpu_threads: int = Field(default=1, gt=0)
    """Threads of each trainer rank. CPU only."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Deadline of one call to all trainer ranks. A missed deadline ends the trainer and names the late ranks."""
    progress_timeout_s: float = Field(default=600.0, gt=0)
    """A trainer whose ranks make no progress for this long during a call is ended and counts as dead. Progress is a
    micro batch, a tensor, a bucket, or a MiB of a file. It must be longer than the first micro batch, which compiles
    kernels on a GPU. `timeout_s` still bounds the whole call."""
    max_restarts: int = Field(default=2, ge=0)
    """Most restarts of the trainer in a run. If a rank dies, hangs or fails, all ranks start again from the newest
    checkpoint. Engines and history stay, and the steps since the checkpoint are repeated."""
    megatron: dict[str, str | int | float | bool] = {}
    """Further fields of Megatron's `TransformerConfig`, those that change how a forward is computed and not what is
    learned (list in `megatron_rl.passthrough`)."""

    @field_validator("megatron")
    @classmethod
    def _check_megatron(cls, value: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        if problem := passthrough_problem(value):
            raise PydanticCustomError("megatron_field", "{problem}", {"problem": problem})
        return value


class RejectionConfig(Config):
    """A hard trust region on the divergence between trainer and sampler.

    With lr = old_logprobs - rollout_logprobs: k1 = -lr, k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr.
    """

    statistic: Literal[
        "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    ]  # fmt: skip
    """`token_*` rejects single tokens. `seq_*` takes the sum, mean or maximum over a sequence and rejects sequences."""
    high: float = Field(gt=0)
    """Upper bound: of k2 and k3 themselves (0.01 is common for `seq_mean_k3`), of the ratio exp(k1) for k1."""
    low: float = Field(default=0.0, ge=0)
    """Lower bound of the ratio exp(k1); k1 only. 0 means 1 / high."""


class CorrectionConfig(Config):
    """Importance weights that correct for the difference between the quantised sampler and the trainer."""

    mode: Literal["none", "tis_token", "tis_sequence", "icepop", "icepop_sequence", "mis_product", "mis_geometric"] = (
        "tis_token"
    )
    """Kind of importance weight. `tis_*` truncates the ratio per token or sequence. `icepop*` sets ratios outside a
    band to zero. `mis_*` masks whole sequences whose ratio is outside the band."""
    cap: float = Field(default=2.0, gt=0)
    """Upper bound of the ratio: the cap of truncated importance sampling, or the upper end of the band."""
    low: float = Field(default=0.5, ge=0)
    """Lower end of the band (`icepop*`, `mis_*`)."""
    veto_ratio: float = Field(default=0.0, ge=0)
    """Sequences with a token whose ratio is below this are rejected and counted (1e-4 is common). 0 turns this off."""
    batch_normalize: bool = False
    """Divide importance weights by their mean over the step."""
    rejected_in_denominators: bool = False
    """Whether rejected tokens count in the means of the loss. false, as in verl: a mean is over the kept tokens. The
    trainer then needs all log-probabilities of a step before its first update, which costs one more forward. true: no
    further forward, but the more is rejected, the smaller the gradient. Rejected by `mis_*`, `veto_ratio` or
    `rejections`."""
    rejections: tuple[RejectionConfig, ...] = ()
    """Hard trust regions. Tokens and sequences outside any of them are left out of the loss and counted."""

    @property
    def is_mask(self) -> bool:
        """Whether the mode's weights are 1 for kept tokens and 0 for rejected ones."""
        return self.mode in ("mis_product", "mis_geometric")

    @property
    def counts_kept_tokens(self) -> bool:
        """Whether the loss's denominators wait for log-probabilities, because rejected tokens leave them."""
        can_reject = self.is_mask or self.veto_ratio > 0 or bool(self.rejections)
        return can_reject and not self.rejected_in_denominators


class AlgorithmConfig(Config):
    """Advantage, loss and batch sizes of policy learning."""

    group_size: int = Field(default=8, gt=0)
    """Responses per prompt."""
    prompts_per_step: int = Field(default=64, gt=0)
    """Prompts of one step, each with a group of responses."""
    num_mini_batches: int = Field(default=1, gt=0)
    """Mini batches of one epoch over the samples of a step."""
    num_epochs: int = Field(default=1, gt=0)
    """Epochs over the samples of a step. A step makes `num_epochs x num_mini_batches` optimizer steps."""
    loss: str = "clipped_surrogate"
    """Policy loss: `clipped_surrogate`, `gspo` or `cispo`, or the dotted path of your own function."""
    advantage: str = "grpo"
    """Advantage: `grpo`, `dr_grpo`, `rloo` or `dapo`, or the dotted path of your own function."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`: mean over tokens of the mini batch. `sequence_mean`: mean over sequences of their token means.
    `seq_mean_token_sum`: mean over sequences of their token sums. `seq_mean_token_sum_norm`: the same, divided by
    `sampling.max_response_tokens`, a constant (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The probability ratio is clipped at 1 - clip_low from below."""
    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped at 1 + clip_high from above (DAPO uses 0.28)."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Dual clip: the loss of a token with a negative advantage is at most this many times the advantage's size (3 is
    common). 0 turns it off."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the mean token entropy in the objective."""
    drop_zero_variance: bool = True
    """Drop groups whose advantages are all zero, as those of equal rewards are: they have no gradient. They are
    counted."""
    max_refill: float = Field(default=0.0, ge=0)
    """Dynamic sampling (DAPO): groups that nothing can be learned from are replaced in the same step. A step then
    trains on `prompts_per_step` groups with signal. This is the most that it samples beyond them, as a multiple of
    `prompts_per_step`; 2 suffices while 40 % of groups have signal. 0 turns it off."""
    mask_truncated: bool = False
    """Leave responses that reached the token limit out of the loss. They are counted."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """`dapo` only: the overlong penalty grows linearly over this many tokens before the limit. 0 turns it off."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """`dapo` only: the overlong penalty at the token limit, in units of reward."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for the difference between sampler and trainer."""

    @property
    def max_groups(self) -> int:
        """Most groups that are sampled for a step."""
        return self.prompts_per_step + int(self.max_refill * self.prompts_per_step)

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, value: str) -> str:
        return _known(value, LOSSES)

    @field_validator("advantage")
    @classmethod
    def _check_advantage(cls, value: str) -> str:
        return _known(value, ADVANTAGES)


def _known(value: str, built_ins: BuiltIns) -> str:
    """`value`; raises an error if it cannot name a function."""
    if problem := built_ins.problem(value):
        raise PydanticCustomError("function_name", "{problem}", {"problem": problem})
    return value


class PublishConfig(Config):
    """Publishing: how new weights reach the engines."""

    transport: Literal["auto", "shm", "gloo", "nccl", "cuda_ipc"] = "auto"
    """`shm` and `gloo` send through host memory. `cuda_ipc` shares device memory after trainer ranks have exchanged
    weights over NCCL. `nccl` sends from device to device and needs engines with devices of their own
    (`placement.mode`). `auto` takes `nccl` for such engines, and `gloo` in a running Ray cluster or with `delta`.
    Otherwise it takes `cuda_ipc` if every engine shares its devices with trainer ranks, else `shm`."""
    bucket_bytes: int = Field(default=64 << 20, gt=0)
    """Upper bound of a bucket. A larger piece of a layer gets a bucket of its own."""
    probe_tokens: int = Field(default=32, gt=1)
    """Length of the fixed probe prompt by which every publish is checked."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of one publish. The error names the late ranks."""
    in_flight: InFlight = "recompute"
    """How running responses continue after new weights arrive. `recompute`: their keys and values are recomputed with
    the new weights. `keep_kv`: they continue at once with keys and values of the old weights. No later response
    shares those, and the trainer cannot recompute such log-probabilities. `drain`: no response starts until all running
    ones have finished."""
    drain_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest time that `drain` waits for running responses."""
    delta: bool = False
    """Send only codes that have changed since the last publish. The trainer keeps a copy of the 8-bit weights, and so
    does every node with engines (`nccl`: every device). Not for `shm` and `cuda_ipc`, which copy nothing."""
    delta_full_every: int = Field(default=20, ge=0)
    """With `delta`, every n-th publish sends all weights. 0: only the first one does."""


class CheckpointConfig(Config):
    """Checkpoints of a run."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints. 0 means only after the last step."""
    keep_last: int = Field(default=2, gt=0)
    """Number of checkpoints to keep. Older ones are removed once a newer one is complete."""
    background: bool = True
    """Write checkpoints while the run goes on, from copies in host memory. Otherwise the run waits, without copies."""
