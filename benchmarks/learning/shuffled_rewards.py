"""A control: GRPO with rewards shuffled within every group, so that nothing can be learned from them."""

import numpy as np

from megatron_rl.algorithm.advantages import GroupOutcome, Rewards, grpo
from megatron_rl.algorithm_settings import Grpo


def shuffled_grpo(outcome: GroupOutcome, settings: Grpo) -> Rewards:
    """[N] GRPO advantages of a group's rewards, assigned to its responses at random.

    The shuffle is a function of the group's lengths and rewards, so all calls for a group agree.
    """
    key = [*outcome.lengths.tolist(), *(outcome.rewards * 1000).astype(np.int64).clip(0).tolist()]
    order = np.random.Generator(np.random.PCG64(key)).permutation(len(outcome.rewards))
    return grpo(outcome, settings)[order]
