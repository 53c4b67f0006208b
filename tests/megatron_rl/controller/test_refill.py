"""Dynamic sampling in the loop: the real planner, pool and batches, while 60 % of groups have no signal.

Engines and scorers are stand-ins in this process, which end responses and scorings in random order.
"""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from history.lengths.book import LengthBook
from megatron_rl.batching.selection import has_signal
from megatron_rl.config import AlgorithmConfig
from megatron_rl.controller.stopping import StopRequestedError
from megatron_rl.trainer.messages import StepResult
from rollout.config import PlannerConfig
from rollout.data.order import PromptOrder, PromptSet
from rollout.planning.planner import Planner
from rollout.planning.refill import RefillRule
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.types import Score, ScoreStatus
from tests.megatron_rl.controller.test_controller import Log, StandIn, controller
from tests.support.pool_stress import SIZE, SLOTS, TEMPLATE, Engine, Ref, World, replace_ray
from tests.support.scored_groups import scorer_answer

PER_STEP, MINI_BATCHES, EPOCHS, NUM_STEPS, NUM_PROMPTS = 8, 4, 2, 6, 60
ALGORITHM = AlgorithmConfig(
    group_size=SIZE,
    prompts_per_step=PER_STEP,
    num_mini_batches=MINI_BATCHES,
    num_epochs=EPOCHS,
    max_refill=6.0,
)
NO_SIGNAL = ("wrong", "right", "not scored")


def outcome(group) -> str:
    """What a group's scorings give: `signal` in 40 % of cases, by its seeds."""
    draw = group.seeds[0] % 10
    return "signal" if draw < 4 else NO_SIGNAL[draw % 3]


def scores(group) -> list[Score]:
    match outcome(group):
        case "not scored":
            return [Score(reward=0.0, status=ScoreStatus.ERROR, is_left_out=True)] * SIZE
        case "signal":
            return [Score(reward=float(sample == 0), status=ScoreStatus.OK) for sample in range(SIZE)]
        case name:
            return [Score(reward=float(name == "right"), status=ScoreStatus.OK)] * SIZE


class Scored(World):
    """Engines that never die."""

    def happen(self):
        busy = [engine for engine in self.engines.actors if engine.running]
        if self.scores and (not busy or self.generator.random() < 0.3):
            ref, group = self.scores.pop(self.generator.randrange(len(self.scores)))
            ref.is_ready, ref.value = True, scorer_answer(scores(group))
        else:
            self.generator.choice(busy).end_one()

    def score(self, group, columns):
        del columns
        ref = Ref()
        self.scores.append((ref, group))
        return ref


class Loop:
    """A controller over stand-ins for everything but planner, pool and batch; `run` runs it."""

    def __init__(self, monkeypatch, *, state=None, first_step=0, max_refill=6.0, stop_after=NUM_STEPS, **config):
        algorithm = ALGORITHM.model_copy(update={"max_refill": max_refill})
        world = Scored(random.Random(first_step))
        replace_ray(monkeypatch, world)
        world.engines = EngineGroup([Engine(world) for _ in range(3)], num_ranks=1)
        self.started, self.placed, self.batches, self.taken, self.metrics = {}, set(), [], [], []
        self.planner = planner(algorithm, state, first_step, config)
        self.pool = EnginePool(
            world.engines,
            [world.scorer],
            seats_per_engine=SLOTS,
            batches=self.planner,
            on_start=self._begun,
        )
        run = controller(Log(), num_steps=NUM_STEPS, first_step=first_step)
        run.planner, run.pool, run.algorithm = self.planner, self.pool, algorithm
        run.history = StandIn(
            prefetch=lambda running, upcoming: None,
            place=lambda homes: self.placed.update(self._prompts(homes)),
            discard_drafts=lambda *, keeps_requests: None,
            record_rewards=lambda groups: None,
            metrics=dict,
        )
        run.trainer = StandIn(train=self._train, ranks=StandIn(check_idle=lambda: None))
        run.evaluator.upcoming = lambda step: []
        run.recorder.on_step = self._on_step
        run.stop_requested = lambda: len(self.metrics) >= stop_after
        self._run = run

    def run(self):
        with suppress(StopRequestedError):
            self._run.run()
        return self

    @staticmethod
    def _prompts(homes):
        return (group.prompt.prompt_id for engines in homes for groups in engines.values() for group in groups)

    def _begun(self, group, engine):
        del engine
        assert group.prompt.prompt_id in self.placed, "the history of a group comes before its first token"
        self.started.setdefault(group.group_id, len(self.metrics))

    def _train(self, batch):
        self.batches.append(batch)
        updates = EPOCHS * len(batch.mini_batches)
        return StepResult(metrics={}, num_optimizer_steps=updates, num_skipped_updates=0)

    def _on_step(self, step, metrics, groups):
        del step
        self.metrics.append(metrics)
        self.taken.append(groups)


def planner(algorithm, state, first_step, config):
    prompts = {f"t/{number}": replace(TEMPLATE.group.prompt, prompt_id=f"t/{number}") for number in range(NUM_PROMPTS)}
    return Planner(
        PromptOrder([PromptSet(prompt_ids=tuple(prompts))], seed=3, state=state),
        prompts,
        config=PlannerConfig(**config),
        lengths=LengthBook(),
        num_steps=NUM_STEPS,
        prompts_per_step=PER_STEP,
        group_size=SIZE,
        sampling=TEMPLATE.group.sampling,
        seed=5,
        first_step=first_step,
        refill=RefillRule(max_groups=algorithm.max_groups, has_signal=partial(has_signal, algorithm=algorithm)),
    )


CONFIGS = [{}, {"policy": "lpt", "max_staleness": 1}, {"overlap": 1, "max_staleness": 1}]


@pytest.mark.parametrize("config", CONFIGS)
def test_optimizer_steps_denominators_and_tokens_stay_as_configured_while_most_groups_have_no_signal(
    monkeypatch, config
):
    loop = Loop(monkeypatch, **config).run()
    assert len(loop.batches) == NUM_STEPS
    assert sum(len(groups) for groups in loop.taken) > 2 * PER_STEP * NUM_STEPS, "rewards were meant to be scarce"
    responses = PER_STEP * SIZE
    for batch, metrics, groups in zip(loop.batches, loop.metrics, loop.taken, strict=True):
        assert [mini.num_sequences for mini in batch.mini_batches] == [responses // MINI_BATCHES] * MINI_BATCHES
        tokens = sum(TEMPLATE.summary.lengths)
        assert [mini.num_response_tokens for mini in batch.mini_batches] == [2 * tokens] * MINI_BATCHES
        assert metrics["actor/optimizer_steps"] == EPOCHS * MINI_BATCHES
        assert metrics["batch/trained_tokens"] == PER_STEP * tokens
        outcomes = Counter(outcome(scored.group) for scored in groups)
        without = sum(outcomes[name] for name in NO_SIGNAL)
        assert outcomes["signal"] == PER_STEP and metrics["refill/missing_groups"] == 0
        assert metrics["refill/groups_without_signal"] == without
        assert metrics["batch/unscored_responses"] == SIZE * outcomes["not scored"]
        assert metrics["batch/zero_variance_groups"] == outcomes["wrong"] + outcomes["right"]
        assert metrics["refill/wasted_tokens"] == tokens * (without + metrics["refill/outdated_groups"])
        assert (metrics["timing_s/refill"] > 0) == (metrics["refill/rounds"] > 0)
    for step, groups in enumerate(loop.taken):
        ages = [step - loop.started[scored.group.group_id] for scored in groups]
        assert max(ages) <= config.get("max_staleness", 0)
    assert loop.planner.metrics()["planner/groups_ahead"] == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_a_run_that_stops_in_the_middle_of_an_epoch_goes_on_with_the_prompts_that_were_not_consumed(
    monkeypatch, config
):
    first = Loop(monkeypatch, stop_after=2, **config).run()
    state = first.planner.state()
    assert state.cursor + len(state.consumed_ahead) < NUM_PROMPTS, "the first epoch is under way"
    second = Loop(monkeypatch, state=state, first_step=2, **config).run()
    assert len(first.taken) + len(second.taken) == NUM_STEPS
    consumed = Counter(one.group.prompt.prompt_id for groups in [*first.taken, *second.taken] for one in groups)
    end = second.planner.state()
    draws = PromptOrder([PromptSet(prompt_ids=tuple(f"t/{number}" for number in range(NUM_PROMPTS)))], seed=3).take(999)
    positions = {*range(end.cursor), *end.consumed_ahead}
    assert consumed == Counter(draw.prompt_id for draw in draws if draw.position in positions)
    assert sum(consumed.values()) > NUM_PROMPTS


@pytest.mark.parametrize("config", CONFIGS)
def test_the_planner_holds_the_groups_of_the_pool_and_no_others(monkeypatch, config):
    """A prompt whose group is dropped as outdated would be lost if the loop did not give the group back."""
    loop = Loop(monkeypatch, **config).run()
    assert set(loop.planner._draws.groups) == {group.group_id for group in loop.pool._places.groups()}
    order = loop.planner._draws.order
    assert sum(len(draws) for draws in order._in_flight.values()) == len(loop.planner._draws.groups)


def test_a_step_goes_on_with_fewer_groups_once_the_limit_is_reached(monkeypatch):
    loop = Loop(monkeypatch, max_refill=0.5).run()
    missing = [metrics["refill/missing_groups"] for metrics in loop.metrics]
    assert max(missing) > 0
    for groups, lacks, batch in zip(loop.taken, missing, loop.batches, strict=True):
        assert PER_STEP - lacks == sum(outcome(scored.group) == "signal" for scored in groups)
        assert len(groups) == 1.5 * PER_STEP or lacks == 0
        assert len(batch.mini_batches) == min(MINI_BATCHES, PER_STEP - lacks)
