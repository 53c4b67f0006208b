"""Results that trainer ranks send to the controller: small, picklable, without tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.weights.quantization_stats import QuantizationStats


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
    fault: str
    """Why an engine did not receive this rank's buckets; empty if nothing failed."""
    codes: Mapping[int, QuantizationStats]
    """Quantisation statistics of this rank's weights by layer; empty in BF16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The trainer's log-probabilities of the probe prompt under published weights."""

    logprobs: npt.NDArray[np.float32]
    """[probe tokens - 1], at temperature 1."""
