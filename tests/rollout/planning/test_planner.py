"""The planner of a run: due groups, batches, and resumed runs."""

import numpy as np
import pytest

from history.lengths.book import LengthBook
from history.types import prompt_key
from rollout.config import PlannerConfig
from rollout.data.order import PromptOrder, PromptSet
from rollout.planning.drawing import GroupDraws
from rollout.planning.plan import EngineLoad
from rollout.planning.planner import Planner
from rollout.types import Prompt, PromptId, SamplingSpec
from tests.support.scored_groups import scored_group

NUM_PROMPTS, PER_STEP = 12, 4
ENGINES = [EngineLoad(num_seats=8)] * 2


def prompt(number: int) -> Prompt:
    return Prompt(
        prompt_id=PromptId(f"t/{number}"),
        data_source="t",
        token_ids=np.array([1], dtype=np.int32),
        ground_truth="",
        extra_info_json="null",
    )


def planner(*, state=None, first_step=0, num_steps=20, **config) -> Planner:
    prompts = {PromptId(f"t/{number}"): prompt(number) for number in range(NUM_PROMPTS)}
    return Planner(
        PromptOrder([PromptSet(prompt_ids=tuple(prompts))], seed=3, state=state),
        prompts,
        config=PlannerConfig(**config),
        lengths=LengthBook(),
        num_steps=num_steps,
        prompts_per_step=PER_STEP,
        group_size=4,
        sampling=SamplingSpec(temperature=1.0, max_response_tokens=64),
        seed=5,
        first_step=first_step,
    )


def scored(group, lengths=(8, 8, 8, 8)):
    from dataclasses import replace

    made = scored_group(0)
    return replace(made, group=group, summary=replace(made.summary, group_id=group.group_id, lengths=tuple(lengths)))


def step(one: Planner, number: int):
    """The groups due and the groups trained on; every group is complete at once."""
    due = one.due(number, ENGINES)
    for group in due.groups:
        one.started(group.group_id)
        one.completed(scored(group))
    return due.groups, one.batch(number)


def test_a_synchronous_run_admits_a_step_and_trains_on_it():
    one = planner()
    for number in range(3):
        groups, batch = step(one, number)
        assert [group.group_id for group in groups] == batch == [4 * number + i for i in range(4)]
        assert {group.step for group in groups} == {number}
        one.consumed([scored(group) for group in groups])
    assert len({group.prompt.prompt_id for group in groups}) == PER_STEP


def test_overlap_admits_a_step_early_and_keeps_the_order_of_a_synchronous_run():
    ahead, plain = planner(overlap=1, max_staleness=1), planner()
    first, batch = step(ahead, 0)
    assert len(first) == 2 * PER_STEP and batch == [0, 1, 2, 3]
    expected = [group for number in range(2) for group in step(plain, number)[0]]
    assert [(g.group_id, g.prompt.prompt_id, g.seeds) for g in first] == [
        (g.group_id, g.prompt.prompt_id, g.seeds) for g in expected
    ]


@pytest.mark.parametrize("policy", ["adaptive", "flexible"])
def test_a_lower_overlap_lets_the_steps_ahead_run_out_and_a_higher_one_admits_ahead_again(policy):
    one, admitted, sizes = planner(policy=policy, overlap=1, max_staleness=1), [], []
    groups = {}
    for number, most in enumerate([None, 0, 0, 0, None, None]):
        one.limit_overlap(most)
        due, batch = step(one, number)
        groups |= {group.group_id: group for group in due}
        admitted.append(len(due) // PER_STEP)
        sizes.append(len(batch))
        one.consumed([scored(groups[group_id]) for group_id in batch])
    assert admitted == [2, 0, 1, 1, 2, 1]
    assert sizes == [PER_STEP] * 6


@pytest.mark.parametrize("policy", ["adaptive", "flexible"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_groups_that_are_shown_in_advance_are_not_ahead_before_they_are_admitted(policy, overlap):
    one = planner(policy=policy, overlap=overlap, max_staleness=overlap)
    groups, batch = step(one, 0)
    one.consumed([scored(group) for group in groups if group.group_id in batch])
    for _ in range(2):
        assert len(one.upcoming(1, ENGINES).groups) == PER_STEP
        assert one.metrics()["planner/groups_ahead"] == overlap * PER_STEP
    one.due(1, ENGINES)
    assert one.metrics()["planner/groups_ahead"] == (overlap + 1) * PER_STEP


def test_there_is_no_head_start_while_the_overlap_is_lowered():
    one = planner(overlap=1, head_start=0.5, max_staleness=2)
    one.lengths.correlation = lambda: 0.9
    one.due(0, ENGINES)
    assert one.metrics()["planner/head_start"] == 0.5
    one.limit_overlap(0)
    one.due(1, ENGINES)
    assert one.metrics()["planner/head_start"] == 0


def test_two_draws_of_a_prompt_in_one_step_have_seeds_of_their_own():
    few = {PromptId(f"t/{number}"): prompt(number) for number in range(PER_STEP - 1)}
    one = Planner(
        PromptOrder([PromptSet(prompt_ids=tuple(few))], seed=3),
        few,
        config=PlannerConfig(),
        lengths=LengthBook(),
        num_steps=20,
        prompts_per_step=PER_STEP,
        group_size=4,
        sampling=SamplingSpec(temperature=1.0, max_response_tokens=64),
        seed=5,
    )
    groups = one.due(0, ENGINES).groups
    assert len({group.prompt.prompt_id for group in groups}) < len(groups)
    assert len({seed for group in groups for seed in group.seeds}) == 4 * len(groups)


def few_draws(*, most_by_version: int) -> GroupDraws:
    """Draws over fewer prompts than a step has groups."""
    few = {PromptId(f"t/{number}"): prompt(number) for number in range(PER_STEP - 1)}
    return GroupDraws(
        order=PromptOrder([PromptSet(prompt_ids=tuple(few))], seed=3),
        prompts=few,
        prompts_per_step=PER_STEP,
        most_by_version=most_by_version,
        group_size=4,
        sampling=SamplingSpec(temperature=1.0, max_response_tokens=64),
        seed=5,
    )


def test_two_draws_of_a_prompt_under_dynamic_sampling_have_seeds_of_their_own():
    draws, groups = few_draws(most_by_version=8 * PER_STEP), []
    for version in range(2):
        for _ in range(3):  # each may draw again what an earlier one has drawn
            shown = draws.further(version, PER_STEP, is_issued=False)
            groups += draws.further(version, PER_STEP, is_issued=True)
            assert shown == tuple(groups[-PER_STEP:])
        draws.put_back([groups[-1].group_id])
        groups += draws.further(version, 1, is_issued=True)
        assert groups[-1].prompt == groups[-2].prompt
    assert len({group.group_id for group in groups}) == len(groups)
    assert len({seed for group in groups for seed in group.seeds}) == 4 * len(groups)


@pytest.mark.parametrize("draws_whole_steps", [True, False])
def test_the_groups_of_a_prompt_in_one_step_are_numbered(draws_whole_steps):
    draws = few_draws(most_by_version=0 if draws_whole_steps else 8 * PER_STEP)
    for number in range(4):
        groups = draws.of_step(number) if draws_whole_steps else draws.further(number, PER_STEP, is_issued=True)
        prompt_ids = [group.prompt.prompt_id for group in groups]
        assert [group.occurrence for group in groups] == [
            prompt_ids[:place].count(prompt_id) for place, prompt_id in enumerate(prompt_ids)
        ]
        assert max(group.first_in_visit for group in groups) == 4


def test_whole_steps_and_further_groups_which_share_numbers_and_seeds_are_not_drawn_by_one_object():
    with pytest.raises(AssertionError, match="drawn by `further`"):
        few_draws(most_by_version=PER_STEP).of_step(0)
    with pytest.raises(AssertionError, match="drawn by `of_step`"):
        few_draws(most_by_version=0).further(0, 1, is_issued=False)


def test_nothing_is_admitted_beyond_the_last_step():
    one = planner(overlap=3, max_staleness=3, num_steps=2)
    assert len(step(one, 0)[0]) == 2 * PER_STEP
    assert step(one, 1)[0] == ()


@pytest.mark.parametrize(
    "config", [{"overlap": 1, "max_staleness": 1}, {"policy": "flexible", "overlap": 1, "max_staleness": 2}]
)
def test_a_resumed_run_issues_groups_in_flight_again_under_the_same_numbers(config):
    one = planner(**config)
    groups, batch = step(one, 0)
    one.consumed([scored(group) for group in groups if group.group_id in batch])
    again = planner(state=one.state(), first_step=1, **config)
    resumed, batch = step(again, 1)
    in_flight = [group for group in groups if group.group_id >= PER_STEP]
    assert [(g.group_id, g.prompt.prompt_id) for g in resumed[:PER_STEP]] == [
        (g.group_id, g.prompt.prompt_id) for g in in_flight
    ]
    assert batch == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"overlap": 1, "max_staleness": 1},
        {"head_start": 0.5, "max_staleness": 1},
        {"policy": "flexible", "overlap": 1, "max_staleness": 2},
    ],
)
def test_the_next_groups_and_their_engines_are_known_once_a_batch_is_consumed(config):
    """What the trainer's time is used for, such as segments beside the engines that need them, is then not in vain."""
    one = planner(**config)
    for visit in (0, 1):
        for number in range(NUM_PROMPTS):
            one.lengths.observe(prompt_key(f"t/{number}"), visit, [3 * number + 2] * 4)
    for number in range(4):
        expected = one.upcoming(number, ENGINES)
        assert one.upcoming(number, ENGINES) == expected
        due = one.due(number, ENGINES)
        assert due == expected
        assert sorted(f.group_id for queue in due.plan.queues for f in queue) == [g.group_id for g in due.groups]
        for group in due.groups:
            one.started(group.group_id)
            one.completed(scored(group))
        batch = one.batch(number)
        found = one._draws.groups
        one.consumed([scored(found[group_id], (5 + group_id % 7,) * 4) for group_id in batch])


def test_a_head_start_needs_accurate_forecasts():
    one = planner(head_start=0.5, max_staleness=1)
    assert len(one.due(0, ENGINES).groups) == PER_STEP
    for visit in (0, 1):
        for number in range(NUM_PROMPTS):
            one.lengths.observe(prompt_key(f"t/{number}"), visit, [3 * number + 2] * 4)
    assert one.lengths.correlation() > 0.9
    groups = one.due(1, ENGINES).groups
    assert [group.step for group in groups] == [1] * PER_STEP + [2] * (PER_STEP // 2)
    assert one.metrics()["planner/head_start"] == 0.5


def test_forecasts_follow_the_lengths_of_trained_groups():
    one = planner()
    groups, _ = step(one, 0)
    one.consumed([scored(group, (10 * i + 10,) * 4) for i, group in enumerate(groups)])
    expected = [one.lengths.expected(prompt_key(group.prompt.prompt_id)) for group in groups]
    assert expected == sorted(expected) and expected[-1] > 2 * expected[0]


def test_expected_remaining_tokens_follow_earlier_lengths_and_end_at_the_limit():
    one = planner(num_steps=20)
    groups, _ = step(one, 0)
    one.lengths.observe(prompt_key(groups[0].prompt.prompt_id), 0, [40] * 50)
    assert one.remaining(groups[0].group_id, 0) == pytest.approx(40, rel=0.05)
    assert one.remaining(groups[0].group_id, 30) == pytest.approx(10, rel=0.2)
    assert 0 < one.remaining(groups[0].group_id, 60) <= 4
    assert one.remaining(groups[1].group_id, 60) == 4
