"""Configuration of the trainer, the algorithm, publishing and checkpoints."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from history.config import LONGEST_S, MOST_PROCESSES, Config
from megatron_rl.algorithm_config import AlgorithmConfig as AlgorithmConfig
from megatron_rl.correction_config import CorrectionConfig as CorrectionConfig
from megatron_rl.correction_config import RejectionConfig as RejectionConfig
from megatron_rl.passthrough import passthrough_problem, recompute_problem
from rollout.config import InFlight

Fp8 = Literal["none", "blockwise", "blockwise_param"]
"""FP8 in the trainer's decoder layers: none, matrix products only, or matrix products and parameters."""


NOT_SUPPORTED = {
    "context": "context parallelism is not supported: for packed samples it needs kernels of Transformer Engine, with "
    "which no CPU test could compare it; raise trainer.parallel.tensor for long samples",
    "virtual_pipeline": "virtual pipeline stages are not supported: at 32B on 32 H100 they would save half a percent "
    "of a step (docs/hardware.md); raise trainer.max_micro_batch_tokens or lower trainer.parallel.pipeline",
}
"""Partitions that Megatron has and this trainer refuses, with the reason and what to do."""


class ParallelConfig(Config):
    """Partition of the trainer over its ranks. The world size is tensor x pipeline x data."""

    tensor: int = Field(default=1, gt=0)
    """Tensor-parallel size. Sequence parallelism is on if it is above 1."""
    pipeline: int = Field(default=1, gt=0)
    """Pipeline-parallel size."""
    data: int = Field(default=1, gt=0, le=MOST_PROCESSES)
    """Data-parallel size."""
    expert: int = Field(default=1, gt=0)
    """Expert-parallel size: experts of a layer are spread over this many data-parallel ranks. Must divide `data`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_partitions(cls, value: object) -> object:
        if isinstance(value, Mapping):
            for key in NOT_SUPPORTED.keys() & value.keys():
                raise PydanticCustomError("partition", "{problem}", {"problem": NOT_SUPPORTED[key]})
        return value

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.pipeline * self.data


class OptimizerConfig(Config):
    """Adam and its learning-rate schedule. Each mini batch makes one optimizer step."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay. Without a decay it must be 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up. A resume does not enter one again that was over."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer steps until `min_learning_rate` is reached. 0 means the whole run, whose last update is the last one
    above `min_learning_rate`. It then follows the steps: a resume with another `algorithm.num_mini_batches` or
    `num_epochs` keeps its place in the run."""
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
    states_on_host: bool = False
    """Keep FP32 weights and moments in pinned host memory. They come to the GPU for each optimizer step and leave after
    it, so forward and backward passes have their memory. The numbers stay the same. Needs `distributed`, also without
    replicas: only then a checkpoint is read without a second copy of the states."""


class CriticOptimizerConfig(OptimizerConfig):
    """The critic's Adam and its learning-rate schedule, as `trainer.optimizer`."""

    learning_rate: float = Field(default=1e-5, ge=0)
    """Peak learning rate; usually above the policy's."""


class CriticConfig(Config):
    """The critic of PPO: a second model, with the trainer's partition and dtype (never FP8)."""

    model: str = ""
    """Hugging Face directory of the critic's first weights; its output layer is replaced by a head of zeros. Empty:
    the policy's."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """Adam and its learning-rate schedule."""
    clip_value: float = Field(default=0.5, ge=0)
    """Values are clipped at this distance from those before the step's first update. 0 turns clipping off."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start of the run in which the critic learns and the policy does not. The policy's learning-rate
    schedule begins after them."""


class ReferenceConfig(Config):
    """The reference policy of the KL terms: the policy as it was at the start of the run, or later."""

    place: Literal["host", "device"] = "host"
    """`host`: one copy of the weights in host memory, which changes places with the policy's for a forward in each
    step. `device`: a second model beside the policy."""
    refresh_every: int = Field(default=0, ge=0)
    """Steps after which the policy becomes the reference. 0: never."""


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
    critic: CriticConfig = CriticConfig()
    """The critic; it exists only if the advantage needs values."""
    reference: ReferenceConfig = ReferenceConfig()
    """The reference policy; it exists only if `algorithm.kl.place` is not `none`, or a function asks for it."""
    max_micro_batch_tokens: int = Field(default=8192, gt=0)
    """Most prompt and response tokens of one micro batch. A longer sample gets a micro batch of its own."""
    attention_parity_tokens: int = Field(default=0, ge=0)
    """Sequence length at which attention costs as much as the linear layers. Micro batches are balanced by it.
    0 derives it from the architecture. Without a pipeline, `perf/attention_parity_tokens` reports measurements."""
    logprob_chunk_tokens: int = Field(default=1024, gt=0)
    """Logits over the vocabulary are computed for this many tokens at a time."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation. `full`: layers keep their inputs, and their forward runs again. `selective`: attention
    runs again, which frees memory only where it is unfused (GPUs below compute capability 9.0 without `flash-attn`)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Trainer state that moves to host memory while engines sample. GPUs only; a warm start has no engines.
    `optimizer`: gradients, master weights and moments. `all`: the weights as well."""
    cpu_threads: int = Field(default=1, gt=0)
    """Threads of each trainer rank. CPU only."""
    timeout_s: float = Field(default=1800.0, gt=0, le=LONGEST_S)
    """Deadline of one call to all trainer ranks. A missed deadline ends the trainer and names the late ranks."""
    progress_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """A trainer whose ranks make no progress for this long during a call is ended and counts as dead. Progress is a
    micro batch, a tensor, a bucket, or a MiB of a file. It must be longer than the first micro batch, which compiles
    kernels on a GPU. `timeout_s` still bounds the whole call."""
    max_restarts: int = Field(default=2, ge=0)
    """Most restarts of a run's trainer within the last 100 finished steps; repeated steps count once. If a rank dies,
    hangs or fails, all ranks start again from the newest checkpoint. Engines and history stay, and the steps since the
    checkpoint are repeated. A warm start has no checkpoint and is not restarted."""
    megatron: dict[str, str | int | float | bool] = {}
    """Further fields of Megatron's `TransformerConfig`, those that change how a forward is computed and not what is
    learned (list in `megatron_rl.passthrough`)."""

    @field_validator("megatron")
    @classmethod
    def _check_megatron(cls, value: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        if problem := passthrough_problem(value):
            raise PydanticCustomError("megatron_field", "{problem}", {"problem": problem})
        return value

    @model_validator(mode="after")
    def _check_recompute(self) -> "TrainerConfig":
        if problem := recompute_problem(self.recompute, self.megatron):
            raise PydanticCustomError("recompute", "{problem}", {"problem": problem})
        return self


class PublishConfig(Config):
    """Publishing: how new weights reach the engines."""

    transport: Literal["auto", "shm", "gloo", "nccl", "cuda_ipc"] = "auto"
    """`shm` and `gloo` send through host memory. `cuda_ipc` shares device memory after trainer ranks have exchanged
    weights over NCCL. `nccl` sends from device to device and needs engines with devices of their own
    (`placement.mode`). `auto` takes `nccl` for such engines, and `gloo` if engines are on other nodes.
    Otherwise it takes `cuda_ipc` if every engine shares its devices with trainer ranks, else `shm`."""
    bucket_bytes: int = Field(default=64 << 20, gt=0)
    """Upper bound of a bucket. A larger piece of a layer gets a bucket of its own."""
    probe_tokens: int = Field(default=32, gt=1)
    """Length of the fixed probe prompt by which every publish is checked. Shorter prompts find fewer faults. It is
    below the longest sequence of the run, and one forward of an engine holds it (`engine.vllm.max_num_batched_tokens`).
    """
    timeout_s: float = Field(default=300.0, gt=0, le=LONGEST_S)
    """Deadline of one publish. The error names the late ranks."""
    in_flight: InFlight = "recompute"
    """How running responses continue after new weights arrive. `recompute`: their keys and values are recomputed with
    the new weights. `keep_kv`: they continue at once with keys and values of the old weights. No later response
    shares those, and the trainer cannot recompute such log-probabilities. `drain`: no response starts until all running
    ones have finished."""
    drain_timeout_s: float = Field(default=3600.0, gt=0, le=LONGEST_S)
    """Longest time that `drain` waits for running responses."""
    delta: bool = False
    """Send only codes that have changed since the last publish. The trainer keeps a copy of the 8-bit weights, and so
    does every engine (`gloo`: in host memory; `nccl`: on its devices). Not for `shm` and `cuda_ipc`, which copy
    nothing. On one machine full publishes are faster, so there it is used only if `transport` is named."""
    delta_full_every: int = Field(default=20, ge=0)
    """With `delta`, every n-th publish sends all weights. 0: only the first one does."""


class CheckpointConfig(Config):
    """Checkpoints of a run."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints. 0 means only after the last step."""
    keep_last: int = Field(default=2, gt=0)
    """Number of checkpoints to keep. Older ones are removed once a newer one is complete: first those that a run has
    passed after it returned by hand to an earlier step."""
    keep_last_samples: int = Field(default=0, ge=0)
    """Number of newest steps whose files in `samples/` and `traces/` are kept, beside those of the first step. Older
    files are removed once a checkpoint is complete. Records of an engine's forwards go in files of 4 MiB or more. 0
    keeps all: about 10 bytes a token, and 28 a forward."""
    background: bool = True
    """Write checkpoints while the run goes on, from copies in host memory. Otherwise the run waits, without copies."""
