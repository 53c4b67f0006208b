"""What trainer ranks report to the controller: small, picklable, free of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.weights.quantization_stats import QuantizationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of one step's training, reported by the last pipeline stage's first rank."""

    metrics: dict[str, float]
    """By verl's names where the meaning is the same: `actor/...`, `rollout_corr/...`."""
    num_optimizer_steps: int
    num_skipped_updates: int
    """Updates left out because a gradient was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """One trainer rank's share of a publish, ready to be read."""

    rank: int
    path: str
    """File under shared memory that holds this rank's buckets one after another; empty if it has none."""
    num_bytes: int
    scales_s: float
    """Seconds until ranks agreed on the scales that they share."""
    pack_s: float
    """Seconds for all other scales, cutting, quantising and writing into buckets."""
    send_s: float
    """Seconds for checksums and handing over."""
    codes: Mapping[int, QuantizationStats]
    """What 8 bits cost this rank's weights, by layer; empty in BF16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The trainer's log-probabilities of the probe prompt under the weights as published."""

    logprobs: npt.NDArray[np.float32]
    """[probe tokens - 1], at temperature 1."""
