"""Specification of a trainer rank. Pure: the controller builds it without torch."""

from dataclasses import dataclass

from megatron_rl.config import AlgorithmConfig, PublishConfig, TrainerConfig
from rollout.weights.format import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """All settings of a trainer rank; equal on all ranks."""

    model: str
    """Hugging Face directory that training starts from."""
    run_id: str
    config: TrainerConfig
    algorithm: AlgorithmConfig
    publish: PublishConfig
    format: WeightFormat
    """Format of the engines."""
    temperature: float
    """Sampling temperature of training responses."""
    max_response_tokens: int
    """Most tokens of a training response."""
    total_updates: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    seed: int
