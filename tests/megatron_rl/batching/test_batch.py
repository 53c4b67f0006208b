"""`build_batch`: the invariants of `megatron_rl.batching.batch`, checked by one helper on every batch built here."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm_settings import ADVANTAGES
from megatron_rl.batching.balance import PackingRules
from megatron_rl.batching.batch import MiniBatch, TrainBatch, build_batch
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.batching.selection import TrainingSample, has_signal, select
from megatron_rl.config import AlgorithmConfig
from rollout.group_parts import num_parts, part_numbers
from rollout.types import (
    ColumnsRef,
    FinishReason,
    GroupId,
    GroupSummary,
    Prompt,
    PromptGroup,
    PromptId,
    SamplingSpec,
    Score,
    ScoredGroup,
    ScoreStatus,
    WeightSpan,
    WeightVersion,
)

MAX_RESPONSE_TOKENS = 64
ADVANTAGE_NAMES = tuple(ADVANTAGES.by_name)
COSTS = CostModel(parity_tokens=50)


def scored_group(group_id, lengths, rewards, *, reasons=None, versions=None, num_prompt_tokens=5):
    reasons = reasons or [FinishReason.STOP] * len(lengths)
    versions = versions or [0] * len(lengths)
    prompt = Prompt(
        prompt_id=PromptId(f"set/{group_id}"),
        data_source="set",
        token_ids=np.arange(num_prompt_tokens, dtype=np.int32),
        ground_truth="",
        extra_info_json="null",
    )
    return ScoredGroup(
        group=PromptGroup(
            group_id=GroupId(group_id),
            step=0,
            prompt=prompt,
            sampling=SamplingSpec(temperature=1.0, max_response_tokens=MAX_RESPONSE_TOKENS),
            seeds=tuple(range(len(lengths))),
        ),
        summary=GroupSummary(
            group_id=GroupId(group_id),
            engine_id=0,
            num_prompt_tokens=num_prompt_tokens,
            lengths=tuple(lengths),
            finish_reasons=tuple(reasons),
            weight_spans=tuple(
                (WeightSpan(weight_version=WeightVersion(v), num_tokens=n),)
                for v, n in zip(versions, lengths, strict=True)
            ),
            started_at_s=0.0,
            finished_at_s=0.0,
        ),
        rewards=tuple(rewards),
        columns=tuple(ColumnsRef(f"columns-{group_id}-{part}") for part in range(num_parts(lengths))),
    )


def samples_of(mini: MiniBatch) -> list[TrainingSample]:
    return [sample for rank in mini.micro_batches for micro in rank for sample in micro.samples]


def check_invariants(batch: TrainBatch, groups, *, dp_size, max_tokens, num_mini_batches) -> None:
    counts = batch.counts
    trained = [sample for mini in batch.mini_batches for sample in samples_of(mini)]
    keys = Counter((sample.group_id, sample.sample) for sample in trained)
    assert all(times == 1 for times in keys.values())
    lost = counts.aborted_responses + counts.unscored_responses
    lost += counts.zero_variance_responses + counts.filtered_responses + counts.masked_truncated_responses
    assert len(trained) == counts.trained_responses
    assert len(trained) + lost == counts.responses == sum(len(group.rewards) for group in groups)
    assert len(batch.mini_batches) <= num_mini_batches
    for mini in batch.mini_batches:
        assert samples_of(mini)
        assert len(mini.micro_batches) == dp_size
        assert len({len(rank) for rank in mini.micro_batches}) == 1
        assert len(mini.micro_batches[0]) >= 1
        for micro in (micro for rank in mini.micro_batches for micro in rank):
            assert micro.num_tokens <= max_tokens or len(micro.samples) == 1
        assert mini.num_sequences == len(samples_of(mini))
        assert mini.num_response_tokens == sum(sample.num_response_tokens for sample in samples_of(mini))
    micros = [micro for mini in batch.mini_batches for rank in mini.micro_batches for micro in rank]
    assert counts.micro_batches * dp_size == len(micros)
    assert (counts.micro_batch_fill > 0) == bool(micros)
    assert 0 <= counts.rank_imbalance <= dp_size - 1
    by_id = {group.group.group_id: group for group in groups}
    for sample in trained:
        summary = by_id[sample.group_id].summary
        assert sample.part == part_numbers(summary.lengths)[sample.sample]
        assert sample.columns == by_id[sample.group_id].columns[sample.part]
        assert sample.num_response_tokens == summary.lengths[sample.sample] > 0
        assert summary.finish_reasons[sample.sample] is not FinishReason.ABORT


def build(groups, *, dp_size=2, max_tokens=100, policy_version=0, seed=0, **algorithm):
    config = AlgorithmConfig(**algorithm)
    batch = build_batch(
        groups,
        policy_version,
        algorithm=config,
        rules=PackingRules(num_ranks=dp_size, max_tokens=max_tokens, costs=COSTS),
        seed=seed,
    )
    check_invariants(batch, groups, dp_size=dp_size, max_tokens=max_tokens, num_mini_batches=config.num_mini_batches)
    trained = {sample.group_id for mini in batch.mini_batches for sample in samples_of(mini)}
    if not config.advantage.name.startswith("reinforce_plus_plus"):  # one group alone is no batch
        assert trained == {scored.group.group_id for scored in groups if has_signal(scored, config)}
    return batch


@st.composite
def group_lists(draw):
    groups = []
    for group_id in range(draw(st.integers(0, 8))):
        size = draw(st.integers(1, 5))
        groups.append(
            scored_group(
                group_id,
                draw(st.lists(st.integers(0, MAX_RESPONSE_TOKENS), min_size=size, max_size=size)),
                draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size)),
                reasons=draw(st.lists(st.sampled_from(list(FinishReason)), min_size=size, max_size=size)),
                num_prompt_tokens=draw(st.integers(1, 30)),
            )
        )
    return groups


@settings(max_examples=150, deadline=None)
@given(
    groups=group_lists(),
    dp_size=st.integers(1, 4),
    max_tokens=st.integers(1, 200),
    num_mini_batches=st.integers(1, 4),
    seed=st.integers(0, 2**63),
    mask_truncated=st.booleans(),
    filter=st.sampled_from(["zero_variance", {"name": "accuracy", "low": 0.4}, "none"]),
    reward_shaping=st.sampled_from(["none", {"name": "overlong", "buffer_tokens": 16}, "length_penalty"]),
    advantage=st.sampled_from(ADVANTAGE_NAMES),
)
def test_invariants_hold_for_any_groups(
    groups, dp_size, max_tokens, num_mini_batches, seed, mask_truncated, filter, reward_shaping, advantage
):
    build(
        groups,
        dp_size=dp_size,
        max_tokens=max_tokens,
        seed=seed,
        num_mini_batches=num_mini_batches,
        mask_truncated=mask_truncated,
        filter=filter,
        reward_shaping=reward_shaping,
        advantage=advantage,
    )


def test_groups_with_equal_rewards_are_dropped_and_counted():
    groups = [scored_group(0, [3, 4], [1.0, 1.0]), scored_group(1, [5, 6], [0.0, 1.0])]
    batch = build(groups)
    assert (batch.counts.zero_variance_groups, batch.counts.trained_responses, batch.counts.trained_tokens) == (
        1,
        2,
        11,
    )


def test_equal_rewards_of_unequal_penalties_are_trained_on():
    """A penalty for length tells responses apart that the reward does not."""
    groups = [scored_group(0, [MAX_RESPONSE_TOKENS, 4], [1.0, 1.0]), scored_group(1, [4, 4], [0.1, 0.1])]
    batch = build(groups, reward_shaping={"name": "overlong", "buffer_tokens": 16})
    (long, short) = samples_of(batch.mini_batches[0])
    assert long.advantage == pytest.approx(-short.advantage) and long.advantage < 0
    assert (batch.counts.zero_variance_groups, batch.counts.trained_responses) == (1, 2)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "opo"])
@pytest.mark.parametrize("reward", [0.1, 1000.1, 1e10 / 3])
def test_equal_rewards_of_any_size_have_no_advantage(advantage, reward):
    """Their mean differs by rounding, which a standard deviation of the same size would blow up."""
    batch = build([scored_group(0, [3] * 7, [reward] * 7)], advantage=advantage)
    assert (batch.counts.zero_variance_groups, batch.counts.trained_responses) == (1, 0)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, 0.0], [0.1 + 0.2, 0.3] * 2, [1e10 + 2e-6, 1e10]])
@pytest.mark.parametrize("advantage", [{"name": "grpo", "std_eps": 0.0}, "grpo", "dr_grpo", "rloo", "opo"])
def test_rewards_that_are_equal_but_for_rounding_are_no_signal(advantage, rewards):
    group = scored_group(0, range(3, 3 + len(rewards)), rewards)
    algorithm = AlgorithmConfig(advantage=advantage, filter="none")
    (kept,) = select([group], 0, algorithm=algorithm)
    assert [sample.advantage for sample in kept.samples] == [0.0] * len(rewards)
    (dropped,) = select([group], 0, algorithm=AlgorithmConfig(advantage=advantage))
    assert (dropped.samples, dropped.zero_variance) == ((), len(rewards))


def test_a_response_whose_scoring_failed_leaves_its_group():
    scores = [Score(reward=r, status=ScoreStatus.OK) for r in (0.0, 1.0)]
    scores.append(Score(reward=0.0, status=ScoreStatus.TIMEOUT, is_left_out=True))
    group = replace(scored_group(0, [3, 4, 5], [0.0, 1.0, 0.0]), scores=tuple(scores))
    batch = build([group], advantage="dr_grpo")
    assert {s.sample: s.advantage for s in samples_of(batch.mini_batches[0])} == {0: -0.5, 1: 0.5}
    assert (batch.counts.unscored_responses, batch.counts.trained_responses) == (1, 2)


def test_groups_with_equal_rewards_stay_when_dropping_is_off():
    batch = build([scored_group(0, [3, 4], [1.0, 1.0])], filter="none")
    assert [sample.advantage for sample in samples_of(batch.mini_batches[0])] == [0.0, 0.0]


def test_aborted_responses_do_not_count_in_the_baseline():
    reasons = [FinishReason.STOP, FinishReason.STOP, FinishReason.ABORT]
    batch = build(
        [scored_group(0, [3, 4, 5], [0.0, 1.0, 100.0], reasons=reasons)],
        advantage="dr_grpo",
    )
    advantages = {sample.sample: sample.advantage for sample in samples_of(batch.mini_batches[0])}
    assert advantages == {0: -0.5, 1: 0.5}
    assert batch.counts.aborted_responses == 1


def test_masked_truncated_responses_still_count_in_the_baseline():
    reasons = [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    batch = build(
        [scored_group(0, [3, 4, 64], [0.0, 1.0, 0.5], reasons=reasons)],
        advantage="dr_grpo",
        mask_truncated=True,
    )
    assert {s.sample: s.advantage for s in samples_of(batch.mini_batches[0])} == {0: -0.5, 1: 0.5}
    assert batch.counts.masked_truncated_responses == 1
    assert batch.mini_batches[0].num_response_tokens == 7


def test_a_batch_of_dropped_groups_is_empty():
    batch = build([scored_group(0, [3, 4], [1.0, 1.0])], num_mini_batches=4)
    assert batch.mini_batches == ()
    assert batch.counts.max_staleness == 0


def test_fewer_samples_than_ranks_leave_empty_micro_batches():
    batch = build([scored_group(0, [3, 4], [0.0, 1.0])], dp_size=4)
    assert [len(rank[0].samples) for rank in batch.mini_batches[0].micro_batches].count(0) == 2


def test_fewer_groups_than_mini_batches_give_fewer_mini_batches():
    batch = build([scored_group(i, [3, 4], [0.0, 1.0]) for i in range(3)], num_mini_batches=8)
    assert len(batch.mini_batches) == 3


def test_groups_stay_whole_and_mini_batches_hold_nearly_equally_many():
    batch = build([scored_group(i, [3, 4], [0.0, 1.0]) for i in range(10)], num_mini_batches=4)
    members = [{sample.group_id for sample in samples_of(mini)} for mini in batch.mini_batches]
    assert sorted(len(groups) for groups in members) == [2, 2, 3, 3]
    assert sum(len(groups) for groups in members) == len(set().union(*members))


def test_a_batch_depends_on_the_seed_and_not_on_the_order_of_arrival():
    groups = [scored_group(i, [3 + i, 9], [0.0, 1.0]) for i in range(12)]
    first = build(groups, num_mini_batches=3, seed=7)
    assert first == build(groups[::-1], num_mini_batches=3, seed=7)
    assert first != build(groups, num_mini_batches=3, seed=8)


def test_staleness_counts_from_the_oldest_version_of_each_response():
    batch = build([scored_group(0, [3, 4], [0.0, 1.0], versions=[2, 5])], policy_version=5)
    assert {s.sample: s.staleness for s in samples_of(batch.mini_batches[0])} == {0: 3, 1: 0}
    assert (batch.counts.max_staleness, batch.counts.mean_staleness) == (3, 1.5)


def test_rewards_that_are_not_finite_are_refused_with_the_group():
    with pytest.raises(ValueError, match=r"group 7.*finite"):
        build([scored_group(7, [3, 4], [0.0, float("nan")])])


def test_columns_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="group 7: 2 lengths"):
        build([scored_group(7, [3, 4], [0.0])])


def test_packing_statistics_of_a_batch_are_counted():
    batch = build([scored_group(0, [5, 15], [0.0, 1.0], num_prompt_tokens=5)], dp_size=2, max_tokens=40)
    counts = batch.counts
    assert (counts.micro_batches, counts.micro_batch_fill) == (1, 30 / 80)
    short, long = COSTS.rank_time([[10]]), COSTS.rank_time([[20]])
    assert counts.rank_imbalance == pytest.approx(long / ((short + long) / 2) - 1)


def test_a_filter_of_accuracy_drops_groups_at_its_bounds_and_counts_them():
    rewards = {0: [0.0, 0.5], 1: [1.0, 1.0], 2: [0.2, 0.2], 3: [0.0, 1.0]}
    groups = [scored_group(number, [3, 4], each) for number, each in rewards.items()]
    batch = build(groups, filter={"name": "accuracy", "low": 0.25, "high": 1.0})
    assert {sample.group_id for sample in samples_of(batch.mini_batches[0])} == {3}
    counts = batch.counts
    assert (counts.filtered_groups, counts.filtered_responses) == (1, 2)
    assert (counts.zero_variance_groups, counts.zero_variance_responses) == (2, 4)


def reported(group, accuracies):
    """The group with the `acc` of each response; None: its scoring failed."""
    failed = {"status": ScoreStatus.ERROR}
    scores = (
        Score(reward=reward, **failed if acc is None else {"status": ScoreStatus.OK, "details": (("acc", acc),)})
        for reward, acc in zip(group.rewards, accuracies, strict=True)
    )
    return replace(group, scores=tuple(scores))


def test_a_filter_of_accuracy_judges_what_the_reward_function_reports_as_acc():
    """Rewards of -1 and 1 as those of verl's math_dapo, in a group with fewer right than wrong answers."""
    mixed = reported(scored_group(0, [3, 4, 5, 6], [-1.0, -1.0, 1.0, -1.0]), [0.0, 0.0, 1.0, 0.0])
    wrong = reported(scored_group(1, [3, MAX_RESPONSE_TOKENS], [-1.0, -1.0]), [0.0, 0.0])
    batch = build([mixed, wrong], filter="accuracy", reward_shaping={"name": "overlong", "buffer_tokens": 16})
    assert {sample.group_id for sample in samples_of(batch.mini_batches[0])} == {0}
    assert (batch.counts.trained_responses, batch.counts.zero_variance_responses) == (4, 2)


def test_a_failed_scoring_with_a_substitute_counts_as_wrong():
    group = reported(scored_group(0, [3, 4], [1.0, -1.0]), [1.0, None])
    assert build([group], filter="accuracy").counts.trained_responses == 2


def test_dropped_groups_do_not_count_in_the_mean_of_a_batch():
    kept, dropped = scored_group(0, [3, 4], [0.0, 1.0]), scored_group(1, [5, 5], [1.0, 1.0])
    alone = build([kept], advantage="reinforce_plus_plus", filter="accuracy")
    both = build([kept, dropped], advantage="reinforce_plus_plus", filter="accuracy")
    assert alone.mini_batches == both.mini_batches


def test_a_group_of_equal_rewards_has_a_signal_where_its_batch_differs():
    groups = [scored_group(0, [3, 4], [1.0, 1.0]), scored_group(1, [5, 6], [0.0, 0.0])]
    batch = build(groups, advantage="reinforce_plus_plus")
    assert batch.counts.trained_responses == 4
    tokens = {s.group_id: s for s in samples_of(batch.mini_batches[0])}
    assert tokens[0].advantage > 0 > tokens[1].advantage


def test_an_advantage_of_ones_own_decides_which_groups_have_no_signal():
    """Rewards do not: this function looks at lengths only."""
    unequal_rewards, unequal_lengths = scored_group(0, [5, 5], [0.0, 1.0]), scored_group(1, [3, 5], [1.0, 1.0])
    own = "tests.megatron_rl.algorithm.own_functions.by_length"
    batch = build([unequal_rewards, unequal_lengths], advantage=own)
    found = {(sample.group_id, sample.sample): sample.advantage for sample in samples_of(batch.mini_batches[0])}
    assert found == {(1, 0): -1.0, (1, 1): 1.0}
    counts = batch.counts
    assert (counts.zero_variance_groups, counts.zero_variance_responses, counts.filtered_groups) == (1, 2, 0)
    assert build([unequal_rewards], advantage=own, filter="none").counts.trained_responses == 2


def test_the_trainer_gets_shaped_rewards_where_it_computes_advantages():
    shaping = {"name": "length_penalty", "penalty": 0.64}
    batch = build([scored_group(0, [10, 20], [1.0, 1.0])], advantage="gae", reward_shaping=shaping)
    samples = samples_of(batch.mini_batches[0])
    assert {s.sample: round(s.reward, 9) for s in samples} == {0: 0.9, 1: 0.8}
    assert {s.advantage for s in samples} == {0.0}


def test_equal_shaped_rewards_are_dropped_where_the_trainer_computes_advantages():
    batch = build([scored_group(0, [10, 10], [1.0, 1.0])], advantage="gae")
    assert (batch.counts.zero_variance_groups, batch.counts.trained_responses) == (1, 0)
