"""Settings of the built-in functions of every stage of the algorithm, one class for each function.

The table of stages is at the head of `megatron_rl.algorithm`, and the functions are in its modules. Pure: the launcher
checks settings without torch.
"""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from megatron_rl.stages import Choice, Column, Stage

_PACKAGE = "megatron_rl.algorithm"


# filter: which groups count


class ZeroVariance(Choice):
    """Drops groups without signal: their advantages are all zero or, where the trainer computes advantages of one's
    own, their rewards are all equal but for rounding. Refused with `discounted_returns` and `gae`, which learn from
    equal rewards too.
    """

    path: ClassVar[str] = f"{_PACKAGE}.filters.zero_variance"
    name: Literal["zero_variance"] = "zero_variance"
    """Name of the function."""


class Accuracy(Choice):
    """Keeps groups whose mean accuracy lies strictly between two bounds (DAPO, arXiv 2503.14476, section 3.2). The
    accuracy of a response is the `acc` of the reward function, else its reward before the shaping. A run ends at an
    accuracy outside 0 to 1.
    """

    path: ClassVar[str] = f"{_PACKAGE}.filters.accuracy"
    name: Literal["accuracy"] = "accuracy"
    """Name of the function."""
    low: float = Field(default=0.0, lt=1)
    """Groups with this mean accuracy or less are dropped. It is below `high`."""
    high: float = Field(default=1.0, gt=0)
    """Groups with this mean accuracy or more are dropped."""

    @model_validator(mode="after")
    def _keeps_a_group(self) -> Self:
        if self.low >= self.high:
            raise PydanticCustomError(
                "accuracy",
                "`low` = {low} is not below `high` = {high}, so every group would be dropped; lower low or raise high",
                {"low": self.low, "high": self.high},
            )
        return self


class KeepAll(Choice):
    """Keeps every group."""

    path: ClassVar[str] = f"{_PACKAGE}.filters.keep_all"
    name: Literal["none"] = "none"
    """Name of the function."""


# reward shaping: rewards that advantages are computed from


class Unshaped(Choice):
    """Leaves rewards as they are."""

    path: ClassVar[str] = f"{_PACKAGE}.shaping.unshaped"
    name: Literal["none"] = "none"
    """Name of the function."""


class Overlong(Choice):
    """Subtracts a penalty that grows linearly over the last tokens before the limit (DAPO, section 3.4)."""

    path: ClassVar[str] = f"{_PACKAGE}.shaping.overlong"
    name: Literal["overlong"] = "overlong"
    """Name of the function."""
    buffer_tokens: int = Field(default=4096, gt=0)
    """The penalty grows over this many tokens before `sampling.max_response_tokens`."""
    penalty: float = Field(default=1.0, ge=0)
    """Penalty at the token limit, in units of reward."""


class LengthPenalty(Choice):
    """Subtracts a penalty in proportion to the length of a response."""

    path: ClassVar[str] = f"{_PACKAGE}.shaping.length_penalty"
    name: Literal["length_penalty"] = "length_penalty"
    """Name of the function."""
    penalty: float = Field(default=0.1, ge=0)
    """Penalty of a response as long as `sampling.max_response_tokens`, in units of reward."""


class RelativeLength(Choice):
    """Adds a reward for the shorter responses of a group (Kimi k1.5, arXiv 2501.12599, section 2.3.3). The reward falls
    linearly from 0.5 for the shortest to -0.5 for the longest, and wrong responses get no positive one.
    """

    path: ClassVar[str] = f"{_PACKAGE}.shaping.relative_length"
    name: Literal["relative_length"] = "relative_length"
    """Name of the function."""
    weight: float = Field(default=1.0, ge=0)
    """Factor of the reward for length."""
    right_above: float = 0.0
    """A response with a reward above this is right."""


# advantage


class AdvantageChoice(Choice):
    """Settings of an advantage."""

    on_trainer: ClassVar[bool] = False
    """Whether the trainer computes it, for each token."""


class Grpo(AdvantageChoice):
    """Rewards standardised over the group (arXiv 2402.03300, section 4.1)."""

    path: ClassVar[str] = f"{_PACKAGE}.advantages.grpo"
    name: Literal["grpo"] = "grpo"
    """Name of the function."""
    std_eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class DrGrpo(AdvantageChoice):
    """Rewards minus the mean of the group (arXiv 2503.20783, section 3.2)."""

    path: ClassVar[str] = f"{_PACKAGE}.advantages.dr_grpo"
    name: Literal["dr_grpo"] = "dr_grpo"
    """Name of the function."""


class Rloo(AdvantageChoice):
    """Rewards minus the mean of the other responses (arXiv 2402.14740, section 3.1)."""

    path: ClassVar[str] = f"{_PACKAGE}.advantages.rloo"
    name: Literal["rloo"] = "rloo"
    """Name of the function."""


class Opo(AdvantageChoice):
    """Rewards minus their mean weighted by lengths (arXiv 2505.23585)."""

    path: ClassVar[str] = f"{_PACKAGE}.advantages.opo"
    name: Literal["opo"] = "opo"
    """Name of the function."""


class ReinforcePlusPlus(AdvantageChoice):
    """Rewards standardised over all tokens of the step (REINFORCE++, arXiv 2501.03262)."""

    path: ClassVar[str] = f"{_PACKAGE}.advantages.reinforce_plus_plus"
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Name of the function."""


class ReinforcePlusPlusBaseline(AdvantageChoice):
    """Rewards minus the mean of the group, then standardised over all tokens of the step (arXiv 2501.03262)."""

    path: ClassVar[str] = f"{_PACKAGE}.advantages.reinforce_plus_plus_baseline"
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Name of the function."""


class DiscountedReturns(AdvantageChoice):
    """The discounted sum of later rewards of each token: REINFORCE++ with `algorithm.kl.place` = reward."""

    path: ClassVar[str] = f"{_PACKAGE}.token_advantages.discounted_returns"
    on_trainer: ClassVar[bool] = True
    name: Literal["discounted_returns"] = "discounted_returns"
    """Name of the function."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from a token to the next."""
    whiten: bool = True
    """Standardise over all tokens of the step."""


class Gae(AdvantageChoice):
    """Generalised advantage estimation with the values of a critic (arXiv 1506.02438, equation 16)."""

    path: ClassVar[str] = f"{_PACKAGE}.token_advantages.gae"
    on_trainer: ClassVar[bool] = True
    needs: ClassVar[frozenset[Column]] = frozenset({"values"})
    name: Literal["gae"] = "gae"
    """Name of the function."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from a token to the next."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Weight of longer estimates: 0 trusts the critic alone, 1 the rewards alone."""
    whiten: bool = True
    """Standardise over all tokens of the step."""


# loss


class LossChoice(Choice):
    """Settings of a loss."""

    aggregation: ClassVar[str] = ""
    """The only aggregation that the loss has a meaning with; empty for any."""


class Clipped(LossChoice):
    """Settings of a loss with PPO's clip."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The probability ratio is clipped at 1 - clip_low from below."""
    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped at 1 + clip_high from above (DAPO uses 0.28)."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Dual clip (arXiv 1912.09729, equation 5): the loss of a token with a negative advantage is at most this many
    times the advantage's size (3 is common). 0 turns it off."""


class ClippedSurrogate(Clipped):
    """PPO's objective (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476, section 3.1)."""

    path: ClassVar[str] = f"{_PACKAGE}.losses.clipped_surrogate"
    name: Literal["clipped_surrogate"] = "clipped_surrogate"
    """Name of the function."""


class Gspo(LossChoice):
    """The clipped surrogate with one ratio for each sequence (arXiv 2507.18071, section 4)."""

    path: ClassVar[str] = f"{_PACKAGE}.sequence_losses.gspo"
    aggregation: ClassVar[str] = "sequence_mean"
    name: Literal["gspo"] = "gspo"
    """Name of the function."""
    clip_low: float = Field(default=3e-4, ge=0, le=0.02)
    """The ratio of a sequence is clipped at 1 - clip_low from below. It is a thousand times nearer to 1 than that of a
    token."""
    clip_high: float = Field(default=4e-4, ge=0, le=0.02)
    """The ratio of a sequence is clipped at 1 + clip_high from above."""


class Cispo(LossChoice):
    """Clipped, detached ratio times log-probability: clipped tokens keep a gradient (arXiv 2506.13585, section 3.1)."""

    path: ClassVar[str] = f"{_PACKAGE}.losses.cispo"
    name: Literal["cispo"] = "cispo"
    """Name of the function."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio is clipped at 1 - clip_low from below; 1 turns this off, as in the paper."""
    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped at 1 + clip_high from above."""


class Sapo(LossChoice):
    """A smooth gate instead of a clip (arXiv 2511.20347)."""

    path: ClassVar[str] = f"{_PACKAGE}.losses.sapo"
    name: Literal["sapo"] = "sapo"
    """Name of the function."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate of tokens with a positive advantage."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of the gate of all other tokens. A steeper gate damps ratios far from 1 more."""


class Gmpo(LossChoice):
    """Geometric mean of the clipped ratios of a sequence (arXiv 2507.20673)."""

    path: ClassVar[str] = f"{_PACKAGE}.sequence_losses.gmpo"
    aggregation: ClassVar[str] = "sequence_mean"
    name: Literal["gmpo"] = "gmpo"
    """Name of the function."""
    clip_low: float = Field(default=0.4, ge=0)
    """The logarithm of a token's ratio is clipped at -clip_low from below."""
    clip_high: float = Field(default=0.4, ge=0)
    """The logarithm of a token's ratio is clipped at clip_high from above."""


class Dppo(LossChoice):
    """Leaves tokens out whose probability has moved too far in the direction of their advantage (arXiv 2602.04879)."""

    path: ClassVar[str] = f"{_PACKAGE}.losses.dppo"
    name: Literal["dppo"] = "dppo"
    """Name of the function."""
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence between the token and all others, as two outcomes: total variation or Kullback-Leibler."""
    bound_low: float = Field(default=0.2, gt=0)
    """Largest divergence of a token whose probability falls (0.05 is common for `kl`)."""
    bound_high: float = Field(default=0.2, gt=0)
    """Largest divergence of a token whose probability rises (0.05 is common for `kl`)."""
    ratio_cap: float = Field(default=20.0, gt=1)
    """Upper bound of the detached ratio that scales a token's gradient."""


class Reinforce(LossChoice):
    """Minus the advantage times the log-probability, without a ratio."""

    path: ClassVar[str] = f"{_PACKAGE}.losses.reinforce"
    name: Literal["reinforce"] = "reinforce"
    """Name of the function."""


class Bypass(Clipped):
    """The clipped surrogate with the sampler's log-probabilities as the old ones. Needs `correction.mode` = none."""

    path: ClassVar[str] = f"{_PACKAGE}.losses.bypass"
    name: Literal["bypass"] = "bypass"
    """Name of the function."""


# aggregation: how the losses of tokens become the loss of a mini batch


class TokenMean(Choice):
    """Mean over the tokens of the mini batch."""

    path: ClassVar[str] = f"{_PACKAGE}.aggregation.token_mean"
    name: Literal["token_mean"] = "token_mean"
    """Name of the function."""


class SequenceMean(Choice):
    """Mean over sequences of their token means."""

    path: ClassVar[str] = f"{_PACKAGE}.aggregation.sequence_mean"
    name: Literal["sequence_mean"] = "sequence_mean"
    """Name of the function."""


class SeqMeanTokenSum(Choice):
    """Mean over sequences of their token sums."""

    path: ClassVar[str] = f"{_PACKAGE}.aggregation.seq_mean_token_sum"
    name: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"
    """Name of the function."""


class SeqMeanTokenSumNorm(Choice):
    """Mean over sequences of their token sums, divided by a constant (Dr. GRPO, arXiv 2503.20783, section 3.2)."""

    path: ClassVar[str] = f"{_PACKAGE}.aggregation.seq_mean_token_sum_norm"
    name: Literal["seq_mean_token_sum_norm"] = "seq_mean_token_sum_norm"
    """Name of the function."""
    constant: int = Field(default=0, ge=0)
    """The constant, in tokens. 0: `sampling.max_response_tokens`."""


FILTERS = Stage("algorithm.filter", (ZeroVariance, Accuracy, KeepAll))
SHAPINGS = Stage("algorithm.reward_shaping", (Unshaped, Overlong, LengthPenalty, RelativeLength))
ADVANTAGES = Stage(
    "algorithm.advantage",
    (Grpo, DrGrpo, Rloo, Opo, ReinforcePlusPlus, ReinforcePlusPlusBaseline, DiscountedReturns, Gae),
    {"dapo": "write `grpo`, and set `algorithm.reward_shaping` to overlong"},
)
LOSSES = Stage("algorithm.loss", (ClippedSurrogate, Gspo, Cispo, Sapo, Gmpo, Dppo, Reinforce, Bypass))
AGGREGATIONS = Stage("algorithm.aggregation", (TokenMean, SequenceMean, SeqMeanTokenSum, SeqMeanTokenSumNorm))
STAGES = (FILTERS, SHAPINGS, ADVANTAGES, LOSSES, AGGREGATIONS)
"""In the order in which they run; the correction runs before the loss and has a class of its own."""
