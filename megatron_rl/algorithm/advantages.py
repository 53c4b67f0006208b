"""Advantages of the responses of one group, from their rewards.

An advantage function takes a `GroupOutcome` and returns one number per response; every token of the response gets
it. `algorithm.advantage` names a built-in function (`grpo`) or the dotted path of any callable of that signature.

* GRPO (arXiv 2402.03300, section 4.1): (r - mean) / (std + eps), with the unbiased std.
* Dr.GRPO (arXiv 2503.20783, section 3.2): r - mean, because dividing by the std favours very easy and very hard
  prompts.
* RLOO (arXiv 2402.14740, section 3.1): r minus the mean of the other responses.
* DAPO (arXiv 2503.14476, section 3.4): GRPO on rewards minus the soft overlong penalty.

Invariants: advantages are finite for finite rewards and zero for equal rewards. They follow a permutation of the
responses. GRPO, Dr.GRPO and RLOO ignore lengths, and their advantages sum to zero over the group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from history.config import load_function
from megatron_rl.built_in import ADVANTAGES

Rewards = npt.NDArray[np.float64]

STD_EPS = 1e-6
"""Added to the standard deviation, so that equal rewards do not divide by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """Input of an advantage function. N: responses of the group, without aborted ones."""

    rewards: Rewards
    """[N]"""
    lengths: npt.NDArray[np.int64]
    """[N], in response tokens."""
    max_response_tokens: int
    """Token limit of a response."""
    overlong_buffer_tokens: int = 0
    """DAPO: the penalty grows over this many tokens before the limit. 0 turns it off."""
    overlong_penalty: float = 1.0
    """DAPO: the penalty at the limit."""


AdvantageFunction = Callable[[GroupOutcome], Rewards]


def grpo(outcome: GroupOutcome) -> Rewards:
    """Rewards standardised over the group, [N]."""
    return _standardise(outcome.rewards)


def dr_grpo(outcome: GroupOutcome) -> Rewards:
    """Rewards minus their mean, [N]."""
    return _centred(outcome.rewards)


def rloo(outcome: GroupOutcome) -> Rewards:
    """Rewards minus the mean of the other responses, [N]; zero for a single response."""
    num_responses = len(outcome.rewards)
    if num_responses < 2:
        return np.zeros_like(outcome.rewards)
    return np.asarray(_centred(outcome.rewards) * (num_responses / (num_responses - 1)))


def dapo(outcome: GroupOutcome) -> Rewards:
    """GRPO on rewards minus the soft overlong penalty, [N]."""
    return _standardise(outcome.rewards - overlong_punishment(outcome))


def overlong_punishment(outcome: GroupOutcome) -> Rewards:
    """0 up to the start of the buffer, then linear up to `overlong_penalty` at the limit, [N]."""
    if outcome.overlong_buffer_tokens == 0:
        return np.zeros_like(outcome.rewards)
    buffer_start = outcome.max_response_tokens - outcome.overlong_buffer_tokens
    exceeded = np.clip((outcome.lengths - buffer_start) / outcome.overlong_buffer_tokens, 0.0, 1.0)
    return np.asarray(exceeded * outcome.overlong_penalty, dtype=np.float64)


def load_advantage(name: str) -> AdvantageFunction:
    """The advantage function of a short name or dotted path; raises ValueError if there is none."""
    return cast(AdvantageFunction, load_function(ADVANTAGES.path(name), field=ADVANTAGES.key))


def advantages(function: AdvantageFunction, outcome: GroupOutcome) -> Rewards:
    """Call `function(outcome)`; raises ValueError unless it returns one finite number per response."""
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
    return np.asarray(_centred(values) / (values.std(ddof=1) + STD_EPS))


def _centred(values: Rewards) -> Rewards:
    """Values minus their mean; exactly zero for equal values, whose mean may differ by rounding."""
    return np.zeros_like(values) if np.ptp(values) == 0 else np.asarray(values - values.mean())
