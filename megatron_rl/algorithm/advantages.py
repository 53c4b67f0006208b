"""Advantages of the responses of one group, from their rewards.

An advantage function takes a `GroupOutcome` and returns one number per response; every token of the response gets
it. Any callable of that signature can be named in the configuration (`algorithm.advantage`).

* GRPO (arXiv 2402.03300, section 4.1): (r - mean) / (std + eps), with the unbiased std.
* Dr.GRPO (arXiv 2503.20783, section 3.2): r - mean, because dividing by the std favours very easy and very hard
  prompts.
* RLOO (arXiv 2402.14740, section 3.1): r minus the mean of the others.
* DAPO (arXiv 2503.14476, section 3.4): GRPO on rewards with the soft overlong punishment.

Invariants: finite for finite rewards; zero for equal rewards; the order of the responses does not matter; GRPO,
Dr.GRPO and RLOO do not see the lengths, and their advantages sum to zero over the group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from history.config import load_function

Rewards = npt.NDArray[np.float64]

STD_EPS = 1e-6
"""Added to the standard deviation, so that equal rewards give zero and not a division by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What an advantage function may look at. N: responses of the group that take part (aborted ones do not)."""

    rewards: Rewards
    """[N]"""
    lengths: npt.NDArray[np.int64]
    """[N] response tokens."""
    max_response_tokens: int
    """The limit at which responses are cut."""
    overlong_buffer_tokens: int = 0
    """DAPO: the punishment grows over the last so many tokens before the limit; 0 turns it off."""
    overlong_penalty: float = 1.0
    """DAPO: the punishment at the limit."""


AdvantageFunction = Callable[[GroupOutcome], Rewards]


def grpo(outcome: GroupOutcome) -> Rewards:
    """Rewards standardised over the group, [N]."""
    return _standardise(outcome.rewards)


def dr_grpo(outcome: GroupOutcome) -> Rewards:
    """Rewards minus their mean, [N]."""
    return np.asarray(outcome.rewards - outcome.rewards.mean())


def rloo(outcome: GroupOutcome) -> Rewards:
    """Rewards minus the mean of the other responses, [N]; zero for a single response."""
    num_responses = len(outcome.rewards)
    if num_responses < 2:
        return np.zeros_like(outcome.rewards)
    return np.asarray((outcome.rewards - outcome.rewards.mean()) * (num_responses / (num_responses - 1)))


def dapo(outcome: GroupOutcome) -> Rewards:
    """GRPO on rewards minus the soft overlong punishment, [N]."""
    return _standardise(outcome.rewards - overlong_punishment(outcome))


def overlong_punishment(outcome: GroupOutcome) -> Rewards:
    """0 until the buffer begins, then linear up to `overlong_penalty` at the limit, [N]."""
    if outcome.overlong_buffer_tokens == 0:
        return np.zeros_like(outcome.rewards)
    buffer_start = outcome.max_response_tokens - outcome.overlong_buffer_tokens
    exceeded = np.clip((outcome.lengths - buffer_start) / outcome.overlong_buffer_tokens, 0.0, 1.0)
    return np.asarray(exceeded * outcome.overlong_penalty, dtype=np.float64)


def load_advantage(path: str) -> AdvantageFunction:
    """The advantage function at a dotted path; raises ValueError when there is none."""
    return cast(AdvantageFunction, load_function(path, field="algorithm.advantage"))


def advantages(function: AdvantageFunction, outcome: GroupOutcome) -> Rewards:
    """`function(outcome)`, checked: a ValueError unless it gives one finite number per response."""
    values = np.asarray(function(outcome), dtype=np.float64)
    if values.shape != outcome.rewards.shape:
        raise ValueError(
            f"algorithm.advantage returned shape {values.shape} for {len(outcome.rewards)} responses; "
            "it must return one number per response"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"algorithm.advantage returned {values.tolist()} for rewards {outcome.rewards.tolist()}")
    return values


def _standardise(values: Rewards) -> Rewards:
    if len(values) < 2:
        return np.zeros_like(values)
    return np.asarray((values - values.mean()) / (values.std(ddof=1) + STD_EPS))
