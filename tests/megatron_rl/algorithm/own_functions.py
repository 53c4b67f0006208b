"""Functions of a user, right and wrong."""

import numpy as np

from history.config import Config
from megatron_rl.algorithm.advantages import BatchOutcome, GroupOutcome, Rewards
from megatron_rl.algorithm.columns import LossInputs, TokenLosses
from megatron_rl.algorithm.plug_in import NoSettings, needs
from megatron_rl.algorithm.token_advantages import TokenAdvantages, TokenOutcome


class Quantile(Config):
    """Which quantile is the baseline."""

    share: float = 0.5


def above_quantile(outcome: GroupOutcome, settings: Quantile) -> Rewards:
    """Rewards minus a quantile of the group."""
    return np.asarray(outcome.rewards - np.quantile(outcome.rewards, settings.share))


def by_length(outcome: GroupOutcome, settings: NoSettings) -> Rewards:
    """Length minus the group's mean length; rewards do not count."""
    del settings
    return np.asarray(outcome.lengths - outcome.lengths.mean())


def of_batch(outcome: BatchOutcome, settings: NoSettings) -> Rewards:
    """Rewards minus their mean over the step."""
    del settings
    rewards = np.concatenate([group.rewards for group in outcome.groups])
    return np.asarray(rewards - rewards.mean())


def of_tokens(outcome: TokenOutcome, settings: NoSettings) -> TokenAdvantages:
    """The reward of a token itself."""
    del settings
    return TokenAdvantages(advantages=outcome.rewards, returns=outcome.rewards, whiten=False)


def mean(inputs: LossInputs, settings: NoSettings) -> TokenLosses:
    """Not one loss for each token."""
    del settings
    return TokenLosses(losses=(inputs.advantages * inputs.logprobs).mean())


def undeclared(inputs: LossInputs, settings: NoSettings) -> TokenLosses:
    """Reads a column that it does not declare."""
    del settings
    return TokenLosses(losses=inputs.logprobs - inputs.ref_logprobs)


@needs("ref")
def declared(inputs: LossInputs, settings: NoSettings) -> TokenLosses:
    """Reads a column that it declares."""
    del settings
    return TokenLosses(losses=inputs.logprobs - inputs.ref_logprobs)


def one_parameter(outcome: GroupOutcome) -> Rewards:
    """Has no settings."""
    return outcome.rewards


def first(outcome: GroupOutcome, settings: NoSettings) -> Rewards:
    """Not one number for each response."""
    del settings
    return outcome.rewards[:1]


def not_numbers(outcome: GroupOutcome, settings: NoSettings) -> Rewards:
    """No finite numbers."""
    del settings
    return np.asarray(outcome.rewards * np.nan)
