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
from rollout.types import (
    ColumnsRef,
    FinishReason,
    GroupColumns,
    GroupId,
    GroupSummary,
    Prompt,
    PromptGroup,
    PromptId,
    SamplingSpec,
    ScoredGroup,
    WeightSpan,
    WeightVersion,
)

INLINE_LIMIT = 100 * 1024
"""Bytes below which Ray sends a result to the owner (`max_direct_call_object_size`)."""
LONGEST = 3 * LEAST_PART_TOKENS
LENGTHS = st.lists(st.integers(0, LONGEST) | st.integers(0, 300), min_size=1, max_size=20)


def columns_of(lengths, seed=0):
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    return GroupColumns(
        prompt_ids=generator.integers(1, 60, 5).astype(np.int32),
        response_ids=generator.integers(1, 60, total).astype(np.int32),
        rollout_logprobs=generator.normal(size=total).astype(np.float32),
        resampled=generator.random(total) < 0.2,
        offsets=np.cumsum([0, *lengths]),
    )


def group_of(number, size):
    return PromptGroup(
        group_id=GroupId(number),
        step=0,
        prompt=Prompt(
            prompt_id=PromptId(f"t/{number}"),
            data_source="t",
            token_ids=np.arange(5, dtype=np.int32),
            ground_truth="",
            extra_info_json="null",
        ),
        sampling=SamplingSpec(temperature=1.0, max_response_tokens=LONGEST),
        seeds=tuple(range(size)),
    )


@settings(deadline=None)
@given(LENGTHS)
def test_the_parts_of_a_group_are_the_group(lengths):
    whole = columns_of(lengths)
    parts = split(whole)
    again = joined(parts)
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
    assert num_parts(lengths) <= most_parts(group_of(0, len(lengths)))
    parts = split(columns_of(lengths))
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
    first, second = split(columns_of([LEAST_PART_TOKENS] * 2))
    for part, sample in ((first, 1), (second, 0), (second, 2), (first, -1)):
        with pytest.raises(IndexError, match=f"response {sample} is not in this part"):
            part.response(sample)


def test_a_pickled_part_has_no_bytes_of_the_others():
    whole = columns_of([LEAST_PART_TOKENS] * 8)
    assert sum(len(pickle.dumps(part)) for part in split(whole)) < 1.01 * len(pickle.dumps(whole)) + 8 * 1000


def scored(number, lengths):
    version = WeightVersion(0)
    group = group_of(number, len(lengths))
    summary = GroupSummary(
        group_id=group.group_id,
        engine_id=0,
        num_prompt_tokens=5,
        lengths=tuple(lengths),
        finish_reasons=(FinishReason.STOP,) * len(lengths),
        weight_spans=tuple((WeightSpan(weight_version=version, num_tokens=length),) for length in lengths),
        started_at_s=0.0,
        finished_at_s=1.0,
    )
    rewards = tuple(float(sample % 2) for sample in range(len(lengths)))
    parts = tuple(ColumnsRef(part) for part in split(columns_of(lengths, seed=number)))
    return ScoredGroup(group=group, summary=summary, rewards=rewards, columns=parts)


def test_a_rank_of_many_fetches_hardly_more_than_it_trains_on():
    """Eight ranks, groups of eight long responses: whole groups would be several times a rank's own tokens."""
    generator = np.random.default_rng(1)
    lengths = [generator.integers(LEAST_PART_TOKENS, LEAST_PART_TOKENS + 4000, 8).tolist() for _ in range(8)]
    groups = [scored(number, each) for number, each in enumerate(lengths)]
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
