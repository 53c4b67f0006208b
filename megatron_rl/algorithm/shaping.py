"""Reward shaping: the rewards that advantages are computed from, on the controller.

A function takes a `GroupOutcome` with the rewards of the reward function and returns one number for each response.
`megatron_rl.algorithm_settings` names the source of each.
"""

import numpy as np

from megatron_rl.algorithm.advantages import GroupOutcome, Rewards
from megatron_rl.algorithm_settings import LengthPenalty, Overlong, RelativeLength, Unshaped


def unshaped(outcome: GroupOutcome, settings: Unshaped) -> Rewards:
    """The rewards, [N]."""
    del settings
    return outcome.rewards


def overlong(outcome: GroupOutcome, settings: Overlong) -> Rewards:
    """Rewards minus a penalty, [N]: 0 up to the start of the buffer, then linear up to `penalty` at the limit."""
    buffer_start = outcome.max_response_tokens - settings.buffer_tokens
    exceeded = np.clip((outcome.lengths - buffer_start) / settings.buffer_tokens, 0.0, 1.0)
    return np.asarray(outcome.rewards - settings.penalty * exceeded, dtype=np.float64)


def length_penalty(outcome: GroupOutcome, settings: LengthPenalty) -> Rewards:
    """Rewards minus `penalty` times the length as a share of the limit, [N]."""
    return np.asarray(outcome.rewards - settings.penalty * outcome.lengths / outcome.max_response_tokens)


def relative_length(outcome: GroupOutcome, settings: RelativeLength) -> Rewards:
    """Rewards plus 0.5 for the shortest to -0.5 for the longest response, [N]; nothing positive for a wrong one."""
    shortest, spread = outcome.lengths.min(), np.ptp(outcome.lengths)
    if spread == 0:
        return outcome.rewards
    bonus = 0.5 - (outcome.lengths - shortest) / spread
    is_right = outcome.rewards > settings.right_above
    return np.asarray(outcome.rewards + settings.weight * np.where(is_right, bonus, np.minimum(bonus, 0.0)))
