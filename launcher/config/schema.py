"""The configuration of each command: launcher composes what the other packages own.

One YAML file holds one of these classes; `launcher.config.loading` reads it, `docs/configuration.md` is
generated from it (`python -m launcher.config.docs`). Relative paths are relative to the directory in
which the command is started.
"""

from typing import Literal

from pydantic import Field

from history.config import Config, HistoryConfig
from megatron_rl.config import AlgorithmConfig, CheckpointConfig, PublishConfig, TrainerConfig
from rollout.config import (
    DataConfig,
    EngineConfig,
    EvalSetConfig,
    EvaluationConfig,
    PlannerConfig,
    RewardConfig,
    SamplingConfig,
)


class WandbConfig(Config):
    """Weights & Biases. Offline runs lie under `wandb/` in the run directory; `wandb sync` uploads them later."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """`online` needs `WANDB_API_KEY` or an earlier `wandb login`; the other two touch no network."""
    project: str = "megatron-rl"
    """Project under which the run is filed."""
    name: str = ""
    """Display name; the run directory's name when empty."""
    sample_rows: int = Field(default=16, ge=0)
    """Responses of each step in the samples table; `samples/` in the run directory always has all of them."""


class ClusterConfig(Config):
    """Where the processes live. One node today."""

    address: str = "local"
    """`local` starts a Ray of its own for the run; otherwise the address of a running one (`auto` finds it)."""
    object_store_bytes: int = Field(default=256 << 20, ge=80 << 20)
    """Shared memory of a Ray that we start."""
    trainer_gpu_fraction: float = Field(default=0.4, gt=0, lt=1)
    """Share of a device that a trainer rank reserves where an engine lives on the same device; GPUs only."""


class PlacementConfig(Config):
    """Who shares devices with whom."""

    mode: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: trainer and engines work in turns on the same devices; responses that are unfinished when training
    begins pause and go on afterwards. `disaggregated`: engines have devices of their own and sample while the trainer
    trains; of use with `planner.overlap` or `planner.head_start`."""


class RunConfig(Config):
    """`megatron-rl run`: reinforcement learning from a Hugging Face directory."""

    model: str
    """Hugging Face directory to start from: `config.json`, safetensors, tokenizer with chat template."""
    run_dir: str
    """Everything the run writes; a directory with a checkpoint is resumed."""
    num_steps: int = Field(gt=0)
    """Trips round the ring, those before a resume included."""
    seed: int = Field(default=0, ge=0)
    """Of prompt order, sampling and batching; nothing else is random."""
    deterministic: bool = False
    """Repeatable bit by bit on one machine: one engine, a whole step admitted before it samples, fixed threads."""
    data: DataConfig
    """What is trained on."""
    sampling: SamplingConfig = SamplingConfig()
    """How training responses are sampled."""
    engine: EngineConfig = EngineConfig()
    """The vLLM engines."""
    planner: PlannerConfig = PlannerConfig()
    """Which engine samples what, and how far engines run ahead of the trainer."""
    placement: PlacementConfig = PlacementConfig()
    """Who shares devices with whom."""
    reward: RewardConfig = RewardConfig()
    """How responses are scored."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation inside the run."""
    trainer: TrainerConfig = TrainerConfig()
    """The Megatron trainer."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is learned from a scored group."""
    publish: PublishConfig = PublishConfig()
    """How weights reach the engines."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""
    history: HistoryConfig = HistoryConfig()
    """What is remembered of finished responses."""
    wandb: WandbConfig = WandbConfig()
    """Tracking."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the processes live."""

    @property
    def samples_ahead(self) -> bool:
        """Whether responses may be unfinished while the trainer works."""
        return self.planner.overlap > 0 or self.planner.head_start > 0

    @property
    def drafts(self) -> bool:
        """Whether any engine drafts; not in a deterministic run, whose batches may not depend on drafts."""
        num_stock = len(set(self.history.baseline_engines))
        return self.history.drafts and not self.deterministic and num_stock < self.engine.num_engines


class SftDataConfig(Config):
    """Rows of `prompt` (chat messages or text) and `response` (text); the loss is over the response alone."""

    path: str
    """A `.jsonl` or `.parquet` file."""
    max_tokens: int = Field(default=1024, gt=0)
    """Prompt plus response; a longer row is refused, naming its line."""


class SftConfig(Config):
    """`megatron-rl sft`: supervised warm start on the same trainer."""

    model: str
    """Hugging Face directory to start from."""
    output_dir: str
    """Hugging Face directory to write; must not exist, or hold an earlier output of this command."""
    data: SftDataConfig
    """What is imitated."""
    num_steps: int = Field(gt=0)
    """Optimizer steps."""
    batch_size: int = Field(default=64, gt=0)
    """Rows of one optimizer step."""
    seed: int = Field(default=0, ge=0)
    """Of the row order."""
    trainer: TrainerConfig = TrainerConfig()
    """The Megatron trainer."""
    log_every: int = Field(default=50, gt=0)
    """Steps between two lines of progress."""
    log_path: str = ""
    """`metrics.jsonl` of the warm start; not written when empty."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the processes live."""


class EvalConfig(Config):
    """`megatron-rl eval`: avg@k and pass@k of any Hugging Face directory, loaded by vLLM itself."""

    model: str
    """Hugging Face directory."""
    sets: dict[str, EvalSetConfig]
    """Evaluation sets by name."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longer prompts are refused, naming the row."""
    engine: EngineConfig = EngineConfig()
    """The vLLM engines; format `bf16` only."""
    reward: RewardConfig = RewardConfig()
    """How responses are scored."""
    seed: int = Field(default=0, ge=0)
    """Of sampling at temperatures above 0."""
    output: str = ""
    """JSON file for the result, one record per set; printed only when empty."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the processes live."""


class ExportConfig(Config):
    """`megatron-rl export`: a checkpoint of a run as a Hugging Face directory."""

    run_dir: str
    """Run directory that holds the checkpoint."""
    output_dir: str
    """Hugging Face directory to write; must not exist."""
    step: int = Field(default=-1, ge=-1)
    """Checkpoint of this step; -1 is the newest."""
