"""Metrics of the difference between sampler and trainer over a step (`rollout_corr/...`).

No rank holds all tokens of a step, so every micro batch contributes a `MismatchSums`: sums, maxima and a histogram of
|lr|. Contributions merge by adding and taking maxima, across ranks by an all-reduce (`vectors` and `from_vectors`).
`finalize` turns the merged vectors into metrics.

Names and definitions are those of verl 0.9.1 where the meaning is the same. Additional metrics are
`ratio_*`, `clip_fraction`, `kept_fraction`, `veto_seq_fraction`, `abs_log_ratio_*` (quantiles exact to a 4 % bin).
All sums are float64. T: response tokens of a micro batch, B: its sequences, lr = old_logprobs - rollout_logprobs.

Invariants: any split of the same sequences into micro batches, in any order, merges to the same metrics. An empty micro
batch is the neutral element and has the same entries, so all ranks reduce vectors of equal size.

`SumsByAge` groups responses by staleness. Quantisation and staleness both separate `old_logprobs` from
`rollout_logprobs`. Responses of staleness 0 show the effect of quantisation alone.

Shape legend: T response tokens of a micro batch, B its sequences, A ages (0 .. the step's largest staleness).
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.algorithm.columns import LOG_RATIO_BOUND
from megatron_rl.algorithm.correction import PackedLogprobs, k3
from megatron_rl.algorithm.mismatch_terms import metrics_of, terms_of
from megatron_rl.correction_config import CorrectionConfig

SMALLEST_BIN = 1e-7
"""Lower edge of the histogram; smaller |lr| count in the first bin."""
BINS_PER_DECADE = 60
NUM_BINS = math.ceil(math.log10(LOG_RATIO_BOUND / SMALLEST_BIN) * BINS_PER_DECADE) + 1
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSums:
    """Contribution of one or more micro batches to the metrics of a step, on the device of their tokens."""

    names: tuple[str, ...]
    """Of the sums."""
    sums: Tensor
    """[len(names)] float64."""
    extremes: tuple[str, ...]
    """Names of the maxima."""
    maxima: Tensor
    """[len(extremes)] float64; -inf before the first token."""
    histogram: Tensor
    """[NUM_BINS] float64 counts of tokens by |lr|."""
    config: CorrectionConfig

    @classmethod
    def of(cls, logprobs: PackedLogprobs, *, config: CorrectionConfig) -> "MismatchSums":
        """The contribution of one micro batch, empty or not."""
        terms = terms_of(logprobs, config=config)
        return cls(
            names=tuple(terms.sums),
            sums=torch.stack([value.double() for value in terms.sums.values()]),
            extremes=tuple(terms.maxima),
            maxima=torch.stack([value.double() for value in terms.maxima.values()]),
            histogram=_histogram(logprobs.log_ratio),
            config=config,
        )

    @classmethod
    def empty(cls, *, config: CorrectionConfig, device: torch.device | None = None) -> "MismatchSums":
        """The neutral element of `merge`; on the CPU if no device is given."""
        nothing = torch.zeros(0, device=device)
        logprobs = PackedLogprobs(old_logprobs=nothing, rollout_logprobs=nothing, lengths=nothing.long())
        return cls.of(logprobs, config=config)

    def merge(self, other: "MismatchSums") -> "MismatchSums":
        """Both contributions together."""
        return replace(
            self,
            sums=self.sums + other.sums,
            maxima=torch.maximum(self.maxima, other.maxima),
            histogram=self.histogram + other.histogram,
        )

    def vectors(self) -> tuple[Tensor, Tensor]:
        """(to be summed over ranks, to be maximised over ranks), both 1-D float64."""
        return torch.cat([self.sums, self.histogram]), self.maxima.clone()

    def from_vectors(self, summed: Tensor, maximised: Tensor) -> "MismatchSums":
        """The names of this contribution with reduced `vectors`."""
        num_sums = len(self.names)
        return replace(self, sums=summed[:num_sums], histogram=summed[num_sums:], maxima=maximised)

    def finalize(self) -> dict[str, float]:
        """Metrics of the step; empty if there are no tokens."""
        sums = dict(zip(self.names, self.sums.tolist(), strict=True))
        maxima = dict(zip(self.extremes, self.maxima.tolist(), strict=True))
        if sums["tokens"] == 0:
            return {}
        metrics = metrics_of(sums, maxima, config=self.config) | _quantiles(self.histogram.cpu())
        return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _histogram(log_ratio: Tensor) -> Tensor:
    """Counts of |lr| in logarithmic bins, [NUM_BINS] float64. NaN counts as the bound; the update is skipped later."""
    sizes = log_ratio.double().abs().nan_to_num(nan=LOG_RATIO_BOUND).clamp(SMALLEST_BIN, LOG_RATIO_BOUND)
    bins = (torch.log10(sizes / SMALLEST_BIN) * BINS_PER_DECADE).floor().long()
    counts = torch.zeros(NUM_BINS, dtype=torch.float64, device=log_ratio.device)
    return counts.index_add(0, bins, torch.ones_like(sizes))  # whole numbers, so their order changes nothing


def _quantiles(histogram: Tensor) -> dict[str, float]:
    """Upper edge of the bin in which each quantile lies."""
    cumulative = histogram.cumsum(0)
    ranks = torch.tensor(list(QUANTILES.values()), dtype=torch.float64) * cumulative[-1]
    bins = torch.searchsorted(cumulative, ranks).tolist()
    edges = [SMALLEST_BIN * 10 ** ((index + 1) / BINS_PER_DECADE) for index in bins]
    return {f"abs_log_ratio_{name}": edge for name, edge in zip(QUANTILES, edges, strict=True)}


_NUM_SUMS = 4


@dataclass(slots=True)
class SumsByAge:
    """Tokens, weights, squared weights and k3 by staleness. `add` mutates; sums of all ranks are added up."""

    sums: Tensor
    """[A, 4] float64, on the device of the tokens."""

    @classmethod
    def empty(cls, max_staleness: int, device: torch.device | None = None) -> "SumsByAge":
        """Sums for a step with this largest staleness; on the CPU if no device is given."""
        return cls(torch.zeros(max_staleness + 1, _NUM_SUMS, dtype=torch.float64, device=device))

    def add(self, logprobs: PackedLogprobs, weights: Tensor, staleness: Tensor) -> None:
        """Add a micro batch: `weights` [T] of the loss, `staleness` [B] int64."""
        ages = logprobs.spread(staleness)
        log_ratio = logprobs.log_ratio.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        of_tokens = torch.stack(
            [torch.ones_like(log_ratio), weights.double(), weights.double().square(), k3(log_ratio)]
        )
        self.sums = self.sums.index_add(0, ages, of_tokens.T)

    def metrics(self) -> dict[str, float]:
        """Mean weight, effective sample size (as a share) and k3 per staleness; empty if all responses are fresh."""
        metrics: dict[str, float] = {}
        if len(self.sums) == 1:
            return metrics
        for age, (tokens, weight, squared, divergence) in enumerate(self.sums.tolist()):
            if tokens:
                prefix = f"rollout_corr/stale_{age}"
                metrics[f"{prefix}/tokens"] = tokens
                metrics[f"{prefix}/weight_mean"] = weight / tokens
                metrics[f"{prefix}/eff_sample_size"] = weight**2 / (tokens * squared) if squared else 0.0
                metrics[f"{prefix}/k3_kl"] = divergence / tokens
        return metrics
