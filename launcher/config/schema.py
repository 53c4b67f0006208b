"""The configuration of each command, composed of the configuration classes of all packages.

One YAML file holds one of these classes; `launcher.config.loading` reads it, `docs/configuration.md` is
generated from it (`python -m launcher.config.docs`). Relative paths are relative to the directory in
which the command is started.
"""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from history.config import MOST_SEED, Config, HistoryConfig
from launcher.config.slurm import SlurmConfig
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

_NOT_IN_PROJECTS = "/\\#?%:"
"""Characters that wandb refuses in the name of a project."""


class WandbConfig(Config):
    """Weights & Biases. Offline runs are written to `wandb/` in the run directory; `wandb sync` uploads them later."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """`online` needs `WANDB_API_KEY` or an earlier `wandb login`. The other modes use no network."""
    project: str = Field(default="megatron-rl", max_length=128)
    """Weights & Biases project of the run, without its entity, which the variable WANDB_ENTITY names. At most 128
    characters."""
    name: str = ""
    """Display name. Empty: the name of the run directory."""
    sample_rows: int = Field(default=16, ge=0)
    """Responses of each step in the samples table. `samples/` in the run directory holds all of them."""

    @field_validator("project")
    @classmethod
    def _is_a_name_of_wandb(cls, value: str, info: ValidationInfo) -> str:
        """Refuses early what wandb itself refuses when the run starts."""
        wrong = sorted(set(value) & set(_NOT_IN_PROJECTS))
        if wrong and info.data.get("mode") != "disabled":
            problem = (
                f"the name of a project holds no {' '.join(wrong)}; name the project alone, and its entity (team or "
                "user) by the variable WANDB_ENTITY, which a SLURM job receives by `cluster.slurm.environment`"
            )
            raise PydanticCustomError("wandb_project", "{problem}", {"problem": problem})
        return value


class ClusterConfig(Config):
    """The Ray cluster of the processes."""

    address: str = "local"
    """`local` starts a Ray cluster for the run. Otherwise the address of a running cluster (`auto` finds it)."""
    object_store_bytes: int = Field(default=256 << 20, ge=80 << 20)
    """Object store size of a Ray cluster that the run starts."""
    trainer_gpu_fraction: float = Field(default=0.4, gt=0, lt=1)
    """Share of a device that a trainer rank reserves if an engine uses the same device. GPUs only."""
    min_nodes: int = Field(default=1, gt=0)
    """Nodes that must have joined a running Ray cluster before the run starts processes. A SLURM job sets it."""
    max_nodes: int = Field(default=0, ge=0)
    """Most nodes of a running Ray cluster that the run uses; 0: all. Others replace nodes that die. A SLURM job sets
    it."""
    slurm: SlurmConfig = SlurmConfig()
    """The SLURM job that `megatron-rl slurm` submits."""


class PlacementConfig(Config):
    """Sharing of devices between trainer and engines."""

    mode: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: trainer and engines use the same devices in turns. Unfinished responses pause while the trainer
    trains and resume afterwards. `disaggregated`: engines have devices of their own and sample while the trainer
    trains. Use it with `planner.overlap` or `planner.head_start`."""


class RunConfig(Config):
    """`megatron-rl run`: reinforcement learning from a Hugging Face directory."""

    model: str
    """Hugging Face directory to start from: `config.json`, safetensors, tokenizer with chat template."""
    run_dir: str
    """Directory for everything that the run writes. A run resumes if it holds a checkpoint."""
    num_steps: int = Field(gt=0)
    """Training steps, including those before a resume."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of prompt order, sampling and batching. Nothing else is random."""
    deterministic: bool = False
    """Bitwise repeatable on one machine; tests prove it on CPUs. Needs one engine; a step is admitted as a whole before
    it is sampled. It sets `deterministic_mode` of `trainer.megatron`, unless that names it. With it a trainer on GPUs
    asks Megatron, Transformer Engine, torch, cuBLAS and NCCL for algorithms that repeat; vLLM has no such switch here.
    No run on a GPU has proved that this is enough. Attention without such an algorithm is unfused there, and slower
    (docs/hardware.md)."""
    data: DataConfig
    """Training prompts and their order."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training responses."""
    engine: EngineConfig = EngineConfig()
    """The vLLM engines."""
    planner: PlannerConfig = PlannerConfig()
    """Assignment of groups to engines, and how far engines run ahead of the trainer."""
    placement: PlacementConfig = PlacementConfig()
    """Sharing of devices between trainer and engines."""
    reward: RewardConfig = RewardConfig()
    """Scoring of responses."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation during the run."""
    trainer: TrainerConfig = Field(default=TrainerConfig(), validate_default=True)
    """The Megatron trainer."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, loss and batch sizes of policy learning."""
    publish: PublishConfig = PublishConfig()
    """Publishing of weights to the engines."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the run."""
    history: HistoryConfig = HistoryConfig()
    """History of finished responses, and drafting from it."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    cluster: ClusterConfig = ClusterConfig()
    """The Ray cluster of the processes."""

    @field_validator("trainer")
    @classmethod
    def _make_deterministic(cls, value: TrainerConfig, info: ValidationInfo) -> TrainerConfig:
        """A deterministic run asks for Megatron's deterministic operations, unless `trainer.megatron` names it."""
        megatron = {"deterministic_mode": True, **value.megatron}
        return value.model_copy(update={"megatron": megatron}) if info.data.get("deterministic") else value

    @property
    def samples_ahead(self) -> bool:
        """Whether responses may be unfinished while the trainer works."""
        return self.planner.overlap > 0 or self.planner.head_start > 0

    @property
    def drafts(self) -> bool:
        """Whether any engine drafts; not in a deterministic run, whose batches may not depend on drafts."""
        num_baseline = len(set(self.history.baseline_engines))
        return self.history.drafts and not self.deterministic and num_baseline < self.engine.num_engines


class SftDataConfig(Config):
    """Rows of `prompt` (chat messages or text) and `response` (text). The loss covers the response only."""

    path: str
    """A `.jsonl` or `.parquet` file."""
    max_tokens: int = Field(default=1024, gt=0)
    """Most prompt and response tokens of a row. A longer row is refused, and the error names its line."""
    chat_template_arguments: dict[str, str | int | float | bool] = {}
    """As `data.chat_template_arguments` of `run`."""


class SftConfig(Config):
    """`megatron-rl sft`: supervised fine-tuning on the same trainer, as a warm start."""

    model: str
    """Hugging Face directory to start from."""
    output_dir: str
    """Hugging Face directory to write. It must not exist, or must hold an earlier output of this command, which is
    replaced once the new one is on disk. It holds no other file of this configuration."""
    data: SftDataConfig
    """Training rows."""
    num_steps: int = Field(gt=0)
    """Optimizer steps."""
    batch_size: int = Field(default=64, gt=0)
    """Rows of one optimizer step."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of the row order."""
    trainer: TrainerConfig = TrainerConfig()
    """The Megatron trainer."""
    log_every: int = Field(default=50, gt=0)
    """Steps between progress lines."""
    log_path: str = ""
    """Path of a `metrics.jsonl` of the warm start. Empty: none is written."""
    cluster: ClusterConfig = ClusterConfig()
    """The Ray cluster of the processes."""


class EvalConfig(Config):
    """`megatron-rl eval`: avg@k and pass@k of any Hugging Face directory, loaded by vLLM itself."""

    model: str
    """Hugging Face directory."""
    sets: dict[str, EvalSetConfig]
    """Evaluation sets by name."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Most tokens of a prompt. A longer prompt is refused, and the error names the row."""
    chat_template_arguments: dict[str, str | int | float | bool] = {}
    """As `data.chat_template_arguments` of `run`."""
    engine: EngineConfig = EngineConfig()
    """The vLLM engines. Only format `bf16`."""
    reward: RewardConfig = RewardConfig()
    """Scoring of responses."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of sampling at temperatures above 0."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside those of the model; `sampling.stop_token_ids` of the run."""
    output: str = ""
    """JSON file for the results, one record per set. Empty: results are only printed."""
    cluster: ClusterConfig = ClusterConfig()
    """The Ray cluster of the processes."""


class ExportConfig(Config):
    """`megatron-rl export`: a checkpoint of a run as a Hugging Face directory."""

    run_dir: str
    """Run directory with the checkpoint."""
    output_dir: str
    """Hugging Face directory to write. It must not exist."""
    step: int = Field(default=-1, ge=-1)
    """Step of the checkpoint. -1 is the one from which the run would resume (`checkpoints/latest`)."""
    overrides: tuple[str, ...] = ()
    """`key=value` for keys `trainer.` and `cluster.` of the run's configuration."""
