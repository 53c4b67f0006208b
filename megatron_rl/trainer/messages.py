"""What the controller and trainer ranks send to each other: small, picklable, without tensors. Pure: no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.config import AlgorithmConfig, PublishConfig, TrainerConfig
from megatron_rl.weights.quantization_stats import QuantizationStats
from rollout.weights.fingerprint_sums import Fingerprint
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
    exports: str = ""
    """Folder of a finished save: the ranks hold its policy's parameters alone and can only export them. Empty: the
    ranks train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one training step, from a rank of the last pipeline stage."""

    metrics: dict[str, float]
    """Metrics with verl's names where the meaning is the same: `actor/...`, `rollout_corr/...`."""
    num_optimizer_steps: int
    num_skipped_updates: int
    """Updates skipped because a gradient was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """One trainer rank's share of a publish, ready for engines."""

    rank: int
    path: str
    """Shared-memory file with this rank's buckets in order; empty if the rank has none."""
    num_bytes: int
    scales_s: float
    """Seconds for scales that ranks share."""
    pack_s: float
    """Seconds for all other scales, slicing, quantising and writing to buckets."""
    send_s: float
    """Seconds for checksums and sending."""
    sums_s: float
    """Seconds for sums of what was packed, part of `pack_s`."""
    fault: str
    """Why an engine did not receive this rank's buckets; empty if nothing failed."""
    codes: Mapping[int, QuantizationStats]
    """Quantisation statistics of this rank's weights by layer; empty in BF16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The trainer's log-probabilities of the probe prompt under its own weights."""

    logprobs: npt.NDArray[np.float32]
    """[probe tokens - 1], at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProof:
    """What engines must find after a publish: of one trainer rank, or of all together."""

    sums: Fingerprint
    """Of what was published."""
    probe: ProbeResult | None
    """None on ranks before the last pipeline stage."""
