"""Configuration of the algorithm: batch sizes, the function of every stage, KL and entropy terms, the correction."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from history.config import Config
from megatron_rl.algorithm_settings import (
    ADVANTAGES,
    AGGREGATIONS,
    FILTERS,
    LOSSES,
    SHAPINGS,
    AdvantageChoice,
    ClippedSurrogate,
    Grpo,
    TokenMean,
    Unshaped,
    ZeroVariance,
)
from megatron_rl.correction_config import CorrectionConfig
from megatron_rl.guard_config import GuardConfig
from megatron_rl.stages import Choice, Column

KlEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]
"""An estimate of the divergence from the reference policy at one token."""


class KlConfig(Config):
    """Divergence of the policy from a reference policy, as a cost.

    With d = ref_logprobs - logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. In the reward, k3 of a token is at
    most 10, and `actor/reward_kl_bounded` counts the tokens beyond.
    """

    place: Literal["none", "loss", "reward"] = "none"
    """`loss`: a term of the loss. `reward`: subtracted from the reward of each token; needs an advantage of tokens
    (`discounted_returns`, `gae`)."""
    estimator: KlEstimator = "k3"
    """`k3_unbiased`: k3 times the probability ratio, whose gradient is unbiased off policy (DeepSeek-V3.2); loss
    only."""
    coefficient: float = Field(default=1e-3, ge=0)
    """Factor of the divergence; where it begins if it adapts, also at a resume that changes this key."""
    target: float = Field(default=0.0, ge=0)
    """Divergence for each token, in nats, at which the coefficient is held by changing it after every step
    (arXiv 1909.08593, section 2.2). 0: the coefficient is fixed."""
    horizon: int = Field(default=10_000, gt=0)
    """Responses over which an adaptive coefficient changes by up to a fifth. A step of more responses changes it by no
    more."""


class EntropyConfig(Config):
    """A bonus for the entropy of the policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """Coefficient of the mean token entropy in the objective; where it begins if it adapts, also at a resume that
    changes this key."""
    target: float = Field(default=0.0, ge=0)
    """Entropy in nats below which the bonus counts (arXiv 2505.22312). The coefficient grows after a step
    below it and shrinks after a step above it. 0: the bonus always counts and its coefficient is fixed."""
    change: float = Field(default=5e-3, gt=0)
    """By how much an adaptive coefficient changes after a step. It stays between 0 and `max_coefficient`."""
    max_coefficient: float = Field(default=0.1, gt=0)
    """Upper bound of an adaptive coefficient."""

    @property
    def is_on(self) -> bool:
        """Whether the loss has a term of the entropy in any step."""
        return self.coefficient > 0 or self.target > 0


class AlgorithmConfig(Config):
    """The stages of policy learning, and batch sizes."""

    moved: ClassVar[Mapping[str, str]] = {
        "clip_low": "`algorithm.loss.clip_low`",
        "clip_high": "`algorithm.loss.clip_high`",
        "dual_clip": "`algorithm.loss.dual_clip`",
        "entropy_bonus": "`algorithm.entropy.coefficient`",
        "drop_zero_variance": "`algorithm.filter` = zero_variance (drops them, the default) or none",
        "overlong_buffer_tokens": "`algorithm.reward_shaping` = {name: overlong, buffer_tokens: ...}",
        "overlong_penalty": "`algorithm.reward_shaping` = {name: overlong, penalty: ...}",
    }

    group_size: int = Field(default=8, gt=0)
    """Responses per prompt."""
    prompts_per_step: int = Field(default=64, gt=0)
    """Prompts of one step, each with a group of responses."""
    num_mini_batches: int = Field(default=1, gt=0)
    """Mini batches of one epoch over the samples of a step. Divides `prompts_per_step`, because groups stay whole."""
    num_epochs: int = Field(default=1, gt=0)
    """Epochs over the samples of a step. A step makes `num_epochs x num_mini_batches` optimizer steps."""
    filter: Annotated[Choice, FILTERS] = ZeroVariance()
    """Which groups are trained on. Dropped groups are counted."""
    max_refill: float = Field(default=0.0, ge=0, le=1000)
    """Dynamic sampling (DAPO): groups that nothing can be learned from are replaced in the same step. A step then
    trains on `prompts_per_step` groups with signal. This is the most that it samples beyond them, as a multiple of
    `prompts_per_step`; 2 suffices while 40 % of groups have signal. 0 turns it off."""
    reward_shaping: Annotated[Choice, SHAPINGS] = Unshaped()
    """Rewards that the advantage is computed from."""
    advantage: Annotated[Choice, ADVANTAGES] = Grpo()
    """How good a response, or a token of it, is compared with others."""
    mask_truncated: bool = False
    """Leave responses that reached the token limit out of the loss. They are counted."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for the difference between sampler and trainer."""
    loss: Annotated[Choice, LOSSES] = ClippedSurrogate()
    """Loss of a token."""
    aggregation: Annotated[Choice, AGGREGATIONS] = TokenMean()
    """How the losses of tokens become the loss of a mini batch."""
    kl: KlConfig = KlConfig()
    """Divergence from a reference policy."""
    entropy: EntropyConfig = EntropyConfig()
    """Entropy bonus."""
    guard: GuardConfig = GuardConfig()
    """Acts on the difference between sampler and trainer while the run goes on."""
    mismatch_sample_tokens: int = Field(default=1024, ge=0)
    """Prompt and response tokens of each data-parallel rank that are scored twice more in every step, to split the
    difference between sampler and trainer into quantisation, numerics, staleness and speculation
    (`rollout_corr/part_*`). Whole responses are taken, at least one. 0 turns this off."""

    @property
    def max_groups(self) -> int:
        """Most groups that are sampled for a step."""
        return self.prompts_per_step + int(self.max_refill * self.prompts_per_step)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step that nothing is dropped from."""
        return self.num_epochs * self.num_mini_batches

    @property
    def needs_all_logprobs(self) -> bool:
        """Whether weights, denominators or built-in advantages wait for the old log-probabilities of the whole step."""
        on_trainer = isinstance(self.advantage, AdvantageChoice) and self.advantage.on_trainer
        return self.correction.batch_normalize or self.correction.counts_kept_tokens or on_trainer

    @property
    def stages(self) -> dict[str, Choice]:
        """The chosen function of every stage, by the stage's key."""
        return {
            FILTERS.key: self.filter,
            SHAPINGS.key: self.reward_shaping,
            ADVANTAGES.key: self.advantage,
            LOSSES.key: self.loss,
            AGGREGATIONS.key: self.aggregation,
        }

    @property
    def needs(self) -> frozenset[Column]:
        """Columns of further models that built-in functions and the divergence read. A function of one's own may
        declare more (`megatron_rl.algorithm.plug_in.needed_columns`).
        """
        reference: frozenset[Column] = frozenset() if self.kl.place == "none" else frozenset({"ref"})
        return reference.union(*(choice.needs for choice in self.stages.values()))
