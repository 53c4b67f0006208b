"""Coefficients of the loss that adapt after every step: of the divergence from the reference, and of the entropy bonus.

Both are functions of the metrics of earlier steps alone, which all ranks agree on, and are saved with the checkpoint.
A resume that switches adaptation on, or that configures another coefficient, begins at the configured one.

* KL (arXiv 1909.08593, section 2.2): multiplied by 1 + clip(kl / target - 1, -0.2, 0.2) * min(responses / horizon, 1).
  The paper and verl's `AdaptiveKLController` have no `min`. A step of five horizons far below the target would then
  set the coefficient to 0, from which no later step raises it, and a larger step would make it negative.
* Entropy (arXiv 2505.22312): raised by a constant after a step below the target, lowered after one above it.
  The bonus counts in a step only if the step before was at or below the target.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.algorithm_config import AlgorithmConfig, EntropyConfig, KlConfig

MAX_ERROR = 0.2
"""Largest relative error of the divergence that a change of its coefficient follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Coefficients of one step."""

    kl: float
    entropy: float
    """As it adapts; see `entropy_bonus`."""
    is_entropy_low: bool
    """Whether the entropy of the step before was at or below the target; true if there was none."""

    @classmethod
    def first(cls, algorithm: AlgorithmConfig) -> "Coefficients":
        """Of the first step."""
        return cls(kl=algorithm.kl.coefficient, entropy=algorithm.entropy.coefficient, is_entropy_low=True)

    @property
    def entropy_bonus(self) -> float:
        """Coefficient of the entropy in this step's loss."""
        return self.entropy if self.is_entropy_low else 0.0

    def next(
        self, algorithm: AlgorithmConfig, *, kl: float | None, entropy: float | None, num_responses: int
    ) -> "Coefficients":
        """Of the next step, from this step's means per token (None if unknown) and its trained responses."""
        kl_config, entropy_config = algorithm.kl, algorithm.entropy
        changed = self.kl if kl is None else _next_kl(self.kl, kl_config, kl=kl, num_responses=num_responses)
        if entropy is None or not entropy_config.target:
            return Coefficients(kl=changed, entropy=self.entropy, is_entropy_low=self.is_entropy_low)
        is_low = entropy <= entropy_config.target
        return Coefficients(
            kl=changed, entropy=_next_entropy(self.entropy, entropy_config, is_low=is_low), is_entropy_low=is_low
        )

    def state_dict(self, algorithm: AlgorithmConfig) -> dict[str, float]:
        """Plain numbers for a checkpoint: the coefficients, where each began, and its target, 0 if it is fixed."""
        kl, entropy = algorithm.kl, algorithm.entropy
        return {
            "kl": self.kl,
            "kl_start": kl.coefficient,
            "kl_target": 0.0 if kl.place == "none" else kl.target,
            "entropy": self.entropy,
            "entropy_start": entropy.coefficient,
            "entropy_target": entropy.target,
            "is_entropy_low": float(self.is_entropy_low),
        }

    def restored(self, algorithm: AlgorithmConfig, state: Mapping[str, float]) -> "Coefficients":
        """As saved where a coefficient adapts now and did before, from the same start; as configured elsewhere.

        Checkpoints of earlier versions do not tell. Their coefficients are taken as adapted from the present start. A
        divergence's coefficient of 0, which earlier versions could fall to and never leave, begins anew.
        """
        kl_goes_on, entropy_goes_on = _goes_on("kl", algorithm.kl, state), _goes_on("entropy", algorithm.entropy, state)
        return Coefficients(
            kl=state["kl"] if kl_goes_on and state["kl"] > 0 else self.kl,
            entropy=state["entropy"] if entropy_goes_on else self.entropy,
            is_entropy_low=bool(state["is_entropy_low"]) if entropy_goes_on else self.is_entropy_low,
        )


def _goes_on(name: str, config: KlConfig | EntropyConfig, state: Mapping[str, float]) -> bool:
    """Whether a coefficient goes on adapting from its saved value."""
    if not config.target:
        return False
    if f"{name}_start" not in state:
        return True
    return state[f"{name}_target"] > 0 and state[f"{name}_start"] == config.coefficient


def _next_kl(coefficient: float, config: KlConfig, *, kl: float, num_responses: int) -> float:
    if not config.target:
        return coefficient
    error = min(max(kl / config.target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1.0 + error * min(num_responses / config.horizon, 1.0))


def _next_entropy(coefficient: float, config: EntropyConfig, *, is_low: bool) -> float:
    change = config.change if is_low else -config.change
    return min(max(coefficient + change, 0.0), config.max_coefficient)
