"""Parts of a group's tokens: nothing is lost, few and large enough, and a trainer rank fetches what it trains on."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batching.balance import PackingRules
from megatron_rl.batching.batch import build_batch
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.config import AlgorithmConfig
from megatron_rl.trainer.loaded_batch import load_mini_batch
from rollout.group_parts import LEAST_PART_TOKENS, joined, most_parts, num_parts, part_numbers, split
from rollout.types import GroupColumns
from tests.support.scored_groups import scored_group

INLINE_LIMIT = 100 * 1024
"""Bytes below which Ray sends a result to the owner (`max_direct_call_object_size`)."""
LONGEST = 3 * LEAST_PART_TOKENS
LENGTHS = st.lists(st.integers(0, LONGEST) | st.integers(0, 300), min_size=1, max_size=20)


def parts_of(lengths):
    return list(scored_group(0, lengths=lengths).columns)


@settings(deadline=None)
@given(LENGTHS)
def test_the_parts_of_a_group_are_the_group(lengths):
    whole = joined(parts_of(lengths))
    parts = split(whole)
    again = joined(parts)
    assert len(whole.response_ids) == sum(lengths) and np.diff(whole.offsets).tolist() == lengths
    for name in ("prompt_ids", "response_ids", "rollout_logprobs", "resampled", "offsets"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
        assert getattr(again, name).dtype == getattr(whole, name).dtype
    assert again.first == 0
    for sample, number in enumerate(part_numbers(lengths)):
        part = parts[number]
        np.testing.assert_array_equal(part.response(sample), whole.response(sample))
        np.testing.assert_array_equal(part.logprobs(sample), whole.logprobs(sample))
        np.testing.assert_array_equal(part.resampled_in(sample), whole.resampled_in(sample))


@settings(deadline=None)
@given(LENGTHS)
def test_parts_are_as_many_as_announced_and_too_large_for_the_controller(lengths):
    numbers = part_numbers(lengths)
    assert list(numbers) == sorted(numbers) and set(numbers) == set(range(num_parts(lengths)))
    assert num_parts(lengths) <= most_parts(scored_group(0, lengths=lengths).group)
    parts = parts_of(lengths)
    assert len(parts) == num_parts(lengths)
    if len(parts) > 1:
        assert all(len(pickle.dumps(part)) > INLINE_LIMIT for part in parts)


def test_a_long_response_is_a_part_of_its_own_and_short_ones_are_together():
    long = LEAST_PART_TOKENS
    assert part_numbers([long] * 4) == (0, 1, 2, 3)
    assert part_numbers([100] * 16) == (0,) * 16
    assert part_numbers([long, 100, 100]) == (0, 0, 0)
    assert part_numbers([100, long, long // 2, long // 2, long]) == (0, 0, 1, 1, 2)
    assert part_numbers([0, 0]) == (0, 0)


def test_a_part_refuses_a_response_of_another_part():
    first, second = parts_of([LEAST_PART_TOKENS] * 2)
    for part, sample in ((first, 1), (second, 0), (second, 2), (first, -1)):
        with pytest.raises(IndexError, match=f"response {sample} is not in this part"):
            part.response(sample)


def test_a_pickled_part_has_no_bytes_of_the_others():
    parts = parts_of([LEAST_PART_TOKENS] * 8)
    whole = joined(parts)
    assert sum(len(pickle.dumps(part)) for part in parts) < 1.01 * len(pickle.dumps(whole)) + 8 * 1000


def test_a_rank_of_many_fetches_hardly_more_than_it_trains_on():
    """Eight ranks, groups of eight long responses: whole groups would be several times a rank's own tokens."""
    generator = np.random.default_rng(1)
    lengths = [generator.integers(LEAST_PART_TOKENS, LEAST_PART_TOKENS + 4000, 8).tolist() for _ in range(8)]
    groups = [scored_group(number, lengths=each) for number, each in enumerate(lengths)]
    rules = PackingRules(num_ranks=8, max_tokens=20_000, costs=CostModel(parity_tokens=10_000))
    algorithm = AlgorithmConfig(group_size=8, prompts_per_step=8)
    batch = build_batch(groups, 0, algorithm=algorithm, rules=rules, seed=0)
    for rank in range(8):
        fetched: list[GroupColumns] = []

        def fetch(refs, fetched=fetched):
            fetched.extend(refs)
            return refs

        own = 0
        for mini in batch.of_rank(rank).mini_batches:
            load_mini_batch(mini, fetch, multiple_of=1, device=torch.device("cpu"))
            own += sum(sample.num_response_tokens for micro in mini.micro_batches for sample in micro.samples)
        assert own > 0 and sum(len(part.response_ids) for part in fetched) == own
