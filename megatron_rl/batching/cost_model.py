"""Cost of a micro batch on the trainer: an overhead, its tokens, and attention, which grows with squared lengths.

The unit is the cost of one token in the linear layers. A sample of L tokens costs `L + L^2 / parity_tokens`: at the
parity length, attention costs as much as the linear layers. `attention_parity_tokens` derives it from the architecture.
`MeasuredTimes` fits it to measured micro-batch times, because attention and matrix products reach different shares of
a device's peak. Measurements are reported and never change a run: a resumed run must build the same batches. To use
a measurement, set `trainer.attention_parity_tokens`.

Pure: imports neither torch nor megatron.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_rl.config import TrainerConfig
from megatron_rl.model.spec import ModelSpec

Numbers = npt.NDArray[np.float64]

_LEAST_TIMES = 8
"""Fewest timed micro batches for a fit."""
_WORST_CONDITION = 1e6
"""Largest condition number of the normal equations (unit columns); similar micro batches exceed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients of the time of a rank's micro batches."""

    parity_tokens: int
    """Length at which attention costs as much as the linear layers."""
    overhead_tokens: int = 256
    """Fixed cost of a micro batch: kernel launches, and small matrix products in pipelines. An assumption; it matters
    only if a pipeline can choose between few large and many small micro batches."""
    pipeline: int = 1
    """Pipeline-parallel size."""

    def __post_init__(self) -> None:
        if min(self.parity_tokens, self.pipeline) <= 0 or self.overhead_tokens < 0:
            raise ValueError(f"{self}: sizes must be positive, and the overhead not negative")

    def sample_costs(self, lengths: npt.NDArray[np.int64]) -> Numbers:
        """Costs of samples of these lengths, in tokens."""
        costs: Numbers = lengths * (1.0 + lengths / self.parity_tokens)
        return costs

    def rank_time(self, micro_batches: Sequence[Sequence[int]]) -> float:
        """Time of one rank, in tokens, from the sample lengths of each of its micro batches (at least one)."""
        times = [
            self.overhead_tokens + sum(n * (1.0 + n / self.parity_tokens) for n in micro) for micro in micro_batches
        ]
        return sum(times) + self.fill_bins * max(times)

    @property
    def fill_bins(self) -> int:
        """Filling and draining a pipeline takes this many times the most expensive micro batch (1F1B: stages - 1)."""
        return self.pipeline - 1


def attention_parity_tokens(spec: ModelSpec) -> int:
    """Length at which causal attention does as many multiply-adds as the linear layers and the output layer.

    A token costs one multiply-add for each parameter of the linear layers (of experts, only those that process it). A
    sample of L tokens costs `heads x head_dim x L^2` per layer for attention scores and values under a causal mask. A
    backward pass doubles both.
    """
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    networks = 1 if spec.experts is None else spec.experts.per_token
    router = 0 if spec.experts is None else spec.experts.count * spec.hidden_size
    layer = spec.hidden_size * (2 * query + 2 * key_value) + networks * 3 * spec.hidden_size * spec.ffn_size + router
    linear = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    return max(1, round(linear / (spec.num_layers * query)))


def cost_model(spec: ModelSpec, trainer: TrainerConfig) -> CostModel:
    """Cost model for planning batches; it depends on the configuration only."""
    parity = trainer.attention_parity_tokens or attention_parity_tokens(spec)
    return CostModel(parity_tokens=parity, pipeline=trainer.parallel.pipeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """seconds = overhead_s + seconds_per_token x tokens + seconds_per_square x sum of squared lengths."""

    overhead_s: float
    seconds_per_token: float
    seconds_per_square: float

    @property
    def parity_tokens(self) -> float:
        """Length at which attention takes as long as the linear layers."""
        return self.seconds_per_token / self.seconds_per_square


@dataclass(slots=True)
class MeasuredTimes:
    """Sums of the normal equations of a least-squares fit; constant memory however long a run is."""

    gram: Numbers = field(default_factory=lambda: np.zeros((3, 3)))
    """Gram matrix of (1, tokens, sum of squared lengths)."""
    moments: Numbers = field(default_factory=lambda: np.zeros(3))
    """Products of the same terms with seconds."""

    def add(self, lengths: npt.NDArray[np.integer], seconds: float) -> None:
        """One micro batch of samples with `lengths` took `seconds`."""
        sizes = lengths.astype(np.float64)
        row = np.array([1.0, sizes.sum(), np.square(sizes).sum()])
        self.gram += np.outer(row, row)
        self.moments += row * seconds

    def fit(self) -> MeasuredCosts | None:
        """Fitted costs; None while micro batches are too few or too similar to separate the three parts.

        If least squares gives a negative overhead, the other two are fitted with an overhead of 0.
        """
        if self.gram[0, 0] < _LEAST_TIMES:
            return None
        scale = np.sqrt(np.diagonal(self.gram))
        scaled = self.gram / np.outer(scale, scale)
        if np.linalg.cond(scaled) > _WORST_CONDITION:
            return None
        overhead, linear, quadratic = (np.linalg.solve(scaled, self.moments / scale) / scale).tolist()
        if overhead < 0:
            overhead = 0.0
            linear, quadratic = (np.linalg.solve(scaled[1:, 1:], (self.moments / scale)[1:]) / scale[1:]).tolist()
        if linear <= 0 or quadratic <= 0:
            return None
        return MeasuredCosts(overhead_s=overhead, seconds_per_token=linear, seconds_per_square=quadratic)
