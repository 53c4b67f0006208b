"""What a trainer rank is built from. Pure: the controller makes it without torch."""

from dataclasses import dataclass

from megatron_rl.config import AlgorithmConfig, PublishConfig, TrainerConfig
from rollout.weights.format import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """Everything that a rank is built from; the same on all ranks."""

    model: str
    """Hugging Face directory that training starts from."""
    run_id: str
    config: TrainerConfig
    algorithm: AlgorithmConfig
    publish: PublishConfig
    format: WeightFormat
    """Format of the engines."""
    temperature: float
    """Of the training rollouts."""
    total_updates: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    seed: int
