"""Dynamic sampling: batches on random runs, the numbers that are admitted, and a planner that resumes."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.lengths.book import LengthBook
from rollout.config import PlannerConfig
from rollout.data.order import OrderState, PromptOrder, PromptSet
from rollout.planning.plan import EngineLoad, GroupForecast
from rollout.planning.planner import Planner
from rollout.planning.refill import RefilledBatches, RefillRule, check_refilled
from rollout.types import GroupId, PromptId, SamplingSpec
from tests.support.scored_groups import scored_group

ENGINES = [EngineLoad(num_seats=8)] * 2


class Draws:
    """Numbers groups in the order in which they are admitted; keeps their versions and expected steps."""

    def __init__(self):
        self.steps = {}

    def __call__(self, version, steps, is_admitted):
        first = len(self.steps)
        ids = [GroupId(first + index) for index in range(len(steps))]
        if is_admitted:
            self.steps |= {one: (version, step) for one, step in zip(ids, steps, strict=True)}
        return [
            GroupForecast(group_id=one, step=step, num_responses=4, tokens=9.0)
            for one, step in zip(ids, steps, strict=True)
        ]


class Run:
    """A run of random engines: groups start and end in random order, also while the trainer works."""

    def __init__(self, seed, share, **rule):
        self.draws, self.generator, self.share = Draws(), random.Random(seed), share
        self.batches = RefilledBatches(draw=self.draws, **rule)
        self.waiting, self.running = [], []
        self.started, self.signal, self.tokens = {}, {}, {}
        self.admitted = Counter()

    def admit(self, forecasts, version):
        self.waiting += [forecast.group_id for forecast in forecasts]
        self.admitted[version] += len(forecasts)

    def happen(self, version):
        """A random group starts or ends."""
        if self.waiting and (not self.running or self.generator.random() < 0.6):
            group_id = self.waiting.pop(self.generator.randrange(min(len(self.waiting), 3)))
            self.started[group_id] = version
            self.batches.started(group_id, version)
            self.running.append(group_id)
        elif self.running:
            group_id = self.running.pop(self.generator.randrange(len(self.running)))
            self.signal[group_id] = self.generator.random() < self.share
            self.tokens[group_id] = self.generator.randrange(1, 99)
            self.batches.completed(group_id, has_signal=self.signal[group_id], num_tokens=self.tokens[group_id])

    def step(self, version):
        """The batch of a version, and the groups that leave after it."""
        batches = self.batches
        expected = [forecast.group_id for forecast in batches.upcoming(version)]
        due = batches.due(version)
        assert [forecast.group_id for forecast in due] == expected
        self.admit(due, version)
        while (batch := batches.batch(version)) is None:
            done, size = batches.progress(version)
            assert 0 <= done < size
            self.admit(batches.refill(version), version)
            self.happen(version)
        return batch, batches.outdated(version)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([1.0, 0.7, 0.4, 0.2]),
    size=st.integers(1, 12),
    overlap=st.integers(0, 2),
    slack=st.integers(0, 2),
    repeatable=st.booleans(),
)
def test_every_batch_is_full_and_no_group_is_lost_repeated_or_too_old(seed, share, size, overlap, slack, repeatable):
    num_steps, bound = 8, overlap + slack
    run = Run(
        seed,
        share,
        num_steps=num_steps,
        groups_per_step=size,
        max_groups=1000 * size,
        overlap=overlap,
        max_staleness=bound,
        is_repeatable=repeatable,
    )
    batches, all_outdated = [], []
    for version in range(num_steps):
        batch, outdated = run.step(version)
        batches.append(batch)
        all_outdated += outdated
        counts = run.batches.counts
        dead = [group_id for group_id in batch if not run.signal[group_id]]
        assert (counts.num_without_signal, counts.num_missing) == (len(dead), 0)
        assert counts.num_outdated == len(outdated)
        assert counts.wasted_tokens == sum(run.tokens[group_id] for group_id in [*dead, *outdated])
        assert overlap or not run.waiting + run.running, "without overlap engines have nothing left to do"
        for _ in range(run.generator.randrange(3 * size)):  # the trainer works
            run.happen(version)
    assert not run.waiting + run.running
    check_refilled(
        batches,
        all_outdated,
        started=run.started,
        with_signal=run.signal,
        groups_per_step=size,
        max_staleness=bound,
    )
    assert all(version <= step <= min(version + overlap, num_steps - 1) for version, step in run.draws.steps.values())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([1.0, 0.4]),
    size=st.integers(1, 8),
    overlaps=st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
def test_an_overlap_that_changes_from_step_to_step_breaks_no_invariant(seed, share, size, overlaps):
    run = Run(seed, share, num_steps=8, groups_per_step=size, max_groups=1000 * size, overlap=2, max_staleness=2)
    batches, all_outdated = [], []
    for version, overlap in enumerate(overlaps):
        run.batches.overlap = overlap
        batch, outdated = run.step(version)
        batches.append(batch)
        all_outdated += outdated
        for _ in range(run.generator.randrange(3 * size)):  # the trainer works
            run.happen(version)
    check_refilled(
        batches,
        all_outdated,
        started=run.started,
        with_signal=run.signal,
        groups_per_step=size,
        max_staleness=2,
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.4, 0.1, 0.0]),
    size=st.integers(1, 12),
    extra=st.integers(0, 12),
    overlap=st.integers(0, 2),
)
def test_no_version_admits_more_than_the_limit_and_what_a_batch_lacks_is_counted(seed, share, size, extra, overlap):
    run = Run(
        seed,
        share,
        num_steps=6,
        groups_per_step=size,
        max_groups=size + extra,
        overlap=overlap,
        max_staleness=overlap,
    )
    for version in range(6):
        batch, _ = run.step(version)
        with_signal = sum(run.signal[group_id] for group_id in batch)
        assert run.batches.counts.num_missing == size - with_signal >= 0
        limit = (size + extra) * (overlap + 1 if version == 0 else 1)
        assert run.admitted[version] <= limit
        assert with_signal == size or run.admitted[version] == limit, "a batch was short before the limit was reached"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 10), overlap=st.integers(0, 1))
def test_a_batch_is_the_first_groups_of_the_queue_whatever_ends_first(seed, size, overlap):
    generator = random.Random(seed)
    signal = [generator.random() < 0.5 for _ in range(99 * size)]
    ends = next(end for end in range(len(signal)) if sum(signal[:end]) == size)
    for short_first in (True, False):
        one = RefilledBatches(
            draw=Draws(), num_steps=9, groups_per_step=size, max_groups=40 * size, overlap=overlap, max_staleness=1
        )
        running, admitted = [], one.due(0)
        while (batch := one.batch(0)) is None:
            for group in [*admitted, *one.refill(0)]:
                one.started(group.group_id, 0)
                running.append(group.group_id)
            admitted = []
            # groups with signal end last, or first
            group_id = min(running, key=lambda one: (signal[one] == short_first, generator.random()))
            running.remove(group_id)
            one.completed(group_id, has_signal=signal[group_id], num_tokens=1)
        assert batch == list(range(ends))


def full(one, version, share):
    """All rounds of one version, in which a fixed share of groups has signal; the numbers admitted."""
    admitted, rounds = one.due(version), []
    while True:
        rounds.append(len(admitted))
        for index, group in enumerate(admitted):
            one.started(group.group_id, version)
            has_signal = int((index + 1) * share) > int(index * share)
            one.completed(group.group_id, has_signal=has_signal, num_tokens=1)
        if one.batch(version) is not None:
            one.outdated(version)
            return rounds
        admitted = one.refill(version)


def test_later_steps_admit_at_once_what_the_recent_share_of_signal_asks_for():
    one = RefilledBatches(draw=Draws(), num_steps=9, groups_per_step=64, max_groups=256)
    first, second, third = (full(one, version, 0.4) for version in range(3))
    assert first[0] == 64 and sum(first) <= 256 and len(first) > 1
    # 64 groups with signal of 40 %: 160, and one standard deviation, sqrt(160 x 0.4 x 0.6) / 0.4 = 15.5
    assert len(second) == len(third) == 1
    assert second[0] == pytest.approx(160 + 15.5, rel=0.04) and third[0] == pytest.approx(160 + 15.5, rel=0.04)
    repeatable = RefilledBatches(draw=Draws(), num_steps=9, groups_per_step=64, max_groups=256, is_repeatable=True)
    assert full(repeatable, 0, 0.4) == full(repeatable, 1, 0.4) == first


def test_young_groups_with_signal_stay_for_the_next_step_and_old_ones_leave():
    for bound in (0, 1):
        one = RefilledBatches(draw=Draws(), num_steps=9, groups_per_step=2, max_groups=8, max_staleness=bound)
        for group in one.due(0):
            one.started(group.group_id, 0)
            one.completed(group.group_id, has_signal=False, num_tokens=5)
        more = one.refill(0)  # a third of the groups is believed to have signal, so there are more than two
        assert len(more) == 6
        for group in more:
            one.started(group.group_id, 0)
            one.completed(group.group_id, has_signal=group.group_id in (3, 4, 6, 7), num_tokens=5)
        assert one.batch(0) == [0, 1, 2, 3, 4]
        left = one.outdated(0)
        assert (one.counts.num_kept, one.counts.num_outdated) == ((0, 3) if bound == 0 else (2, 0))
        assert left == ([5, 6, 7] if bound == 0 else [])
        assert one.counts.wasted_tokens == 5 * (3 + len(left))
        if bound:
            assert one.due(1) == []
            assert one.batch(1) == [5, 6, 7]


# -- the planner over an order of prompts ----------------------------------------------------------------

NUM_PROMPTS, PER_STEP = 40, 4


def planner(*, state=None, first_step=0, repeatable=False, **config):
    template = scored_group(0).group.prompt
    prompts = {PromptId(f"t/{number}"): replace(template, prompt_id=f"t/{number}") for number in range(NUM_PROMPTS)}
    return Planner(
        PromptOrder([PromptSet(prompt_ids=tuple(prompts))], seed=3, state=state),
        prompts,
        config=PlannerConfig(**config),
        lengths=LengthBook(),
        num_steps=12,
        prompts_per_step=PER_STEP,
        group_size=4,
        sampling=SamplingSpec(temperature=1.0, max_response_tokens=64),
        seed=5,
        first_step=first_step,
        refill=RefillRule(
            max_groups=10 * PER_STEP, has_signal=lambda scored: any(scored.rewards), is_repeatable=repeatable
        ),
    )


def scored(group):
    """A group that has signal in 4 of 10 cases, by its seeds."""
    made = scored_group(0)
    rewards = (float(group.seeds[0] % 10 < 4),) * 4
    return replace(made, group=group, summary=replace(made.summary, group_id=group.group_id), rewards=rewards)


class Trial:
    """A planner whose groups all end as soon as they are admitted."""

    def __init__(self, one):
        self.planner, self.found = one, {}

    def step(self, number):
        """(admitted, taken) groups of a step."""
        one, admitted = self.planner, []
        due = one.due(number, ENGINES)
        while True:
            planned = [forecast for queue in due.plan.queues for forecast in queue]
            assert sorted(forecast.group_id for forecast in planned) == [group.group_id for group in due.groups]
            for group in due.groups:
                self.found[group.group_id] = scored(group)
                one.started(group.group_id)
                one.completed(self.found[group.group_id])
            admitted += due.groups
            if (batch := one.batch(number)) is not None:
                break
            due = one.refill(number, ENGINES)
        one.put_back([self.found.pop(group_id) for group_id in one.outdated(number)])
        taken = [self.found.pop(group_id) for group_id in batch]
        one.consumed(taken)
        return admitted, taken


def seeds(step):
    """What identifies the admitted and the taken groups of a step."""
    admitted, taken = step
    groups = [*admitted, *(one.group for one in taken)]
    return [(group.group_id, group.step, group.prompt.prompt_id, group.seeds) for group in groups]


def test_a_planner_admits_until_a_batch_is_full_and_shows_the_next_groups_in_advance():
    trial = Trial(planner())
    for number in range(12):
        upcoming = trial.planner.upcoming(number, ENGINES)
        assert upcoming == trial.planner.upcoming(number, ENGINES)
        admitted, taken = trial.step(number)
        assert list(upcoming.groups) == admitted[: len(upcoming.groups)]
        assert sum(any(one.rewards) for one in taken) == PER_STEP
        metrics = trial.planner.metrics()
        assert metrics["refill/groups_without_signal"] == len(taken) - PER_STEP
        assert metrics["refill/outdated_groups"] == len(admitted) - len(taken)
        assert metrics["refill/missing_groups"] == metrics["planner/groups_ahead"] == 0
    assert trial.planner.upcoming(12, ENGINES).groups == ()


def test_a_repeatable_run_resumes_at_every_step_with_the_same_groups_and_seeds():
    whole, states, steps = Trial(planner(repeatable=True)), [], []
    for number in range(12):
        states.append(OrderState.from_json(whole.planner.state().to_json()))
        steps.append(whole.step(number))
    assert len({one.group.prompt.prompt_id for _, taken in steps for one in taken}) == NUM_PROMPTS, "more than an epoch"
    for first in range(1, 12):
        resumed = Trial(planner(state=states[first], first_step=first, repeatable=True))
        assert seeds(resumed.step(first)) == seeds(steps[first])


@pytest.mark.parametrize("config", [{}, {"max_staleness": 1}, {"overlap": 1, "max_staleness": 1}])
def test_a_run_that_is_resumed_in_the_middle_of_an_epoch_consumes_every_prompt_once(config):
    for stop in (1, 2, 5):
        before = Trial(planner(**config))
        taken = [one for number in range(stop) for one in before.step(number)[1]]
        after = Trial(planner(state=before.planner.state(), first_step=stop, **config))
        taken += [one for number in range(stop, 12) for one in after.step(number)[1]]
        state = after.planner.state()
        assert len(taken) == state.cursor + len(state.consumed_ahead) > NUM_PROMPTS
        prompts = {f"t/{number}": None for number in range(NUM_PROMPTS)}
        draws = PromptOrder([PromptSet(prompt_ids=tuple(prompts))], seed=3).take(len(taken) + NUM_PROMPTS)
        consumed = {*range(state.cursor), *state.consumed_ahead}
        expected = Counter(draw.prompt_id for draw in draws if draw.position in consumed)
        assert Counter(one.group.prompt.prompt_id for one in taken) == expected
        assert len({one.group.group_id for one in taken}) == len(taken)
