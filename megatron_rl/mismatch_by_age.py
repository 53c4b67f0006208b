"""The gap between sampler and trainer, response by response as old as they are.

Quantisation and staleness both move `old_logprobs` from `rollout_logprobs`, and one weight repairs both. Apart they
can be told by how old a response is: what those of staleness 0 show is quantisation alone.

Shape legend: T response tokens of a micro batch, B its sequences, A ages (0 .. the step's largest staleness).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.correction import LOG_RATIO_BOUND, PackedLogprobs, k3

_NUM_SUMS = 4


@dataclass(slots=True)
class SumsByAge:
    """Tokens, weights, their squares and k3 by age; `add` mutates. Parts of other ranks are added to `sums`."""

    sums: Tensor
    """[A, 4] float64, on the CPU."""

    @classmethod
    def empty(cls, max_staleness: int) -> "SumsByAge":
        """Of a step whose responses are at most so stale."""
        return cls(torch.zeros(max_staleness + 1, _NUM_SUMS, dtype=torch.float64))

    def add(self, logprobs: PackedLogprobs, weights: Tensor, staleness: Sequence[int]) -> None:
        """A micro batch: `weights` [T] as they enter the loss, `staleness` [B]."""
        if not staleness:
            return
        ages = torch.tensor(staleness, device=weights.device).repeat_interleave(logprobs.lengths)
        log_ratio = logprobs.log_ratio.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        of_tokens = torch.stack(
            [torch.ones_like(log_ratio), weights.double(), weights.double().square(), k3(log_ratio)]
        )
        self.sums += torch.zeros_like(self.sums, device=weights.device).index_add(0, ages, of_tokens.T).cpu()

    def metrics(self) -> dict[str, float]:
        """Mean weight, effective sample size (share) and k3 of each age that occurs; none if all responses are
        fresh.
        """
        found: dict[str, float] = {}
        if len(self.sums) == 1:
            return found
        for age, (tokens, weight, squared, divergence) in enumerate(self.sums.tolist()):
            if tokens:
                prefix = f"rollout_corr/stale_{age}"
                found[f"{prefix}/tokens"] = tokens
                found[f"{prefix}/weight_mean"] = weight / tokens
                found[f"{prefix}/eff_sample_size"] = weight**2 / (tokens * squared) if squared else 0.0
                found[f"{prefix}/k3_kl"] = divergence / tokens
        return found
