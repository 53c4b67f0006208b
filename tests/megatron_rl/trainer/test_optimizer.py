"""The policy's optimizer follows its configuration: warm-up and decay across a resume, weight decay, clip."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import AlgorithmConfig, CriticConfig, CriticOptimizerConfig, OptimizerConfig, ParallelConfig
from tests.megatron_rl.trainer.test_trainer import ALGORITHMS, batch_for, trainer_spec
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import save_model

ALGORITHM, SINGLE = ALGORITHMS["one update"], ParallelConfig()


def rates(position, parallel, spec, batches, path, saved_after):
    """Metrics of each step, and where the policy's schedule stands after it, in updates. Saves after so many steps to
    `path`, or resumes from it before the first one if `saved_after` is None.
    """
    from megatron_rl.trainer.trainer import Trainer

    trainer, found = Trainer(spec, position), []
    if saved_after is None:
        trainer.load(path)
    for number, batch in enumerate(batches, start=1):
        result = trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
        found.append((result.metrics, trainer._policy.schedule.num_steps))
        if number == saved_after:
            save(trainer, path)
    return found


def steps_of(batch, num_steps):
    """The batch in each step of a run."""
    return [replace(batch, policy_version=step) for step in range(num_steps)]


@pytest.mark.parametrize("saved_after", [1, 3], ids=["in the warm-up", "in the decay"])
def test_a_resumed_run_goes_on_with_warm_up_and_decay_where_it_stopped(ranks, tmp_path, saved_after):
    model, path = save_model("qwen3_tied", tmp_path / "model"), str(tmp_path / "saved")
    batches = steps_of(batch_for(SINGLE, ALGORITHM), 5)
    spec = trainer_spec(model, SINGLE, ALGORITHM, decay="linear", warmup_steps=2)
    spec = replace(spec, total_updates=5)
    (whole,) = ranks.run(rates, spec, batches, path, saved_after, parallel=SINGLE)
    # two updates of warm-up, then a line that would reach 0 one update after the run
    assert [metrics["actor/lr"] for metrics, _ in whole] == pytest.approx([0.5e-2, 1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    assert [position for _, position in whole] == [1, 2, 3, 4, 5]
    (resumed,) = ranks.run(rates, spec, batches[saved_after:], path, None, parallel=SINGLE)
    found, expected = (
        [(metrics["actor/lr"], position) for metrics, position in steps] for steps in (resumed, whole[saved_after:])
    )
    assert found == expected


def decayed(style, share):
    """Closed form of a decay to 0, at this share of its way."""
    return 1e-2 * {"linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[style]


PEAK, NUM_STEPS, WARM_STEPS = 1e-2, 20, 5


def start(config, updates, state=None):
    """A model without weights, whose steps have so many updates; at the start of the run or after a checkpoint."""
    from megatron_rl.trainer.optimizer import LearnedModel, build_schedule

    optimizer, total = SimpleNamespace(param_groups=[{"max_lr": PEAK, "min_lr": 0.0}]), NUM_STEPS * updates
    schedule = build_schedule(config, optimizer, total_steps=total)
    model = LearnedModel(chunks=(), optimizer=optimizer, schedule=schedule, config=config, total_updates=total)
    if state is not None:
        model.restore_schedule(state)
    return model


def take(model, steps, updates):
    """The rates of all updates of these steps; every third one makes a single update."""
    found = []
    for step in steps:
        model.begin_schedule(step, configured=updates)
        made = 1 if step % 3 == 0 else updates
        for _ in range(made):
            model.schedule.step(increment=1)
            found.append(model.learning_rate)
        model.finish_schedule(configured=updates, made=made)
    return found


def updates_of(steps, updates):
    """Numbers from 1 of the updates that `take` makes, in a run whose steps all have so many."""
    return [step * updates + number + 1 for step in steps for number in range(1 if step % 3 == 0 else updates)]


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(("before", "now"), [(8, 1), (1, 8), (4, 2), (2, 3), (3, 3)])
def test_a_decay_over_the_run_keeps_its_place_if_a_resume_changes_the_updates_of_a_step(style, before, now):
    # 5 steps of warm-up; with a single update a step the whole run has fewer updates than it has in the first case
    config = OptimizerConfig(learning_rate=PEAK, decay=style, warmup_steps=WARM_STEPS * before)
    model = start(config, before)
    take(model, range(10), before)
    last = model.learning_rate
    model = start(config, now, model.schedule.state_dict())
    found = take(model, range(10, 15), now)
    found += take(start(config, now, model.schedule.state_dict()), range(15, NUM_STEPS), now)  # nothing changes
    warm, end = WARM_STEPS * now, NUM_STEPS * now + 1
    expected = [decayed(style, (n - warm) / (end - warm)) for n in updates_of(range(10, NUM_STEPS), now)]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert expected[0] < last + 1e-4 and expected[-1] > 0  # no jump up, and the last update still learns


@pytest.mark.parametrize("steps_before", [2, 12])
def test_a_resume_with_a_longer_warm_up_of_the_critic_begins_the_policys_schedule_after_it(steps_before):
    """Within the rate's warm-up and behind it; the policy has taken steps before the resume."""
    config = OptimizerConfig(learning_rate=PEAK, decay="linear", warmup_steps=10)
    model = start(config, 2)
    take(model, range(steps_before), 2)
    model = start(config, 2, model.schedule.state_dict())
    model.begin_schedule(0, configured=2)
    assert (model.schedule.num_steps, model.schedule.lr_warmup_steps, model.learning_rate) == (0, 10, 0.0)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("before", "now", "warm"), [(8, 1, 30), (1, 8, 30), (2, 3, 15)])
def test_a_warm_up_under_way_goes_on_by_the_updates_that_were_made(style, before, now, warm):
    config = OptimizerConfig(learning_rate=PEAK, decay=style, warmup_steps=warm)
    model = start(config, before)
    last = take(model, range(3), before)[-1]
    found = take(start(config, now, model.schedule.state_dict()), range(3, NUM_STEPS), now)
    assert last == pytest.approx(PEAK * 3 * before / warm)
    assert 0 < found[0] - last <= PEAK / warm * 1.001  # one update further, neither back nor ahead
    position, expected = 3 * before, []
    for step in range(3, NUM_STEPS):
        if position >= warm and style != "constant":  # the warm-up is over: the decay takes its place in the run
            position, warm = step * now, round(warm * step * now / position)
        for n in range(position + 1, position + 1 + (1 if step % 3 == 0 else now)):
            share = max(0.0, (n - warm) / (max(NUM_STEPS * now + 1, warm + 1) - warm))
            expected.append(PEAK * min(n / warm, 1.0) * (1.0 if style == "constant" else decayed(style, share) / PEAK))
        position += now
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("before", "now"), [(8, 1), (1, 8)])
def test_configured_decay_steps_count_the_updates_that_were_made(before, now):
    config = OptimizerConfig(learning_rate=PEAK, decay="linear", warmup_steps=4, decay_steps=200)
    model = start(config, before)
    take(model, range(10), before)
    found = take(start(config, now, model.schedule.state_dict()), range(10, NUM_STEPS), now)
    shift = 10 * (before - now)
    expected = [decayed("linear", (n + shift - 4) / (200 - 4)) for n in updates_of(range(10, NUM_STEPS), now)]
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("style", ["constant", "linear"])
def test_a_longer_warm_up_is_not_entered_after_its_end(style):
    config = OptimizerConfig(learning_rate=PEAK, decay=style, warmup_steps=4)
    model = start(config, 2)
    take(model, range(10), 2)
    found = take(start(config, 2, model.schedule.state_dict()), range(10, NUM_STEPS), 2)
    longer = config.model_copy(update={"warmup_steps": 35})
    assert take(start(longer, 2, model.schedule.state_dict()), range(10, NUM_STEPS), 2) == found
    assert found[0] == pytest.approx(PEAK if style == "constant" else decayed("linear", (21 - 4) / (41 - 4)))


def test_policy_and_critic_keep_their_places_if_a_resume_changes_the_mini_batches(ranks, tmp_path):
    model, path = save_model("qwen3_tied", tmp_path / "model"), str(tmp_path / "saved")
    found = []
    for num_mini_batches, steps, saved_after in ((4, slice(2), 2), (1, slice(2, 4), None)):
        sizes = {"group_size": 4, "prompts_per_step": 4, "num_mini_batches": num_mini_batches}
        algorithm = AlgorithmConfig.model_validate({**sizes, "advantage": "gae"})
        spec = trainer_spec(model, SINGLE, algorithm, decay="linear")
        critic = CriticConfig(optimizer=CriticOptimizerConfig(learning_rate=PEAK, decay="cosine"))
        config = spec.config.model_copy(update={"critic": critic})
        spec = replace(spec, config=config, total_updates=4 * num_mini_batches)
        batches = steps_of(batch_for(SINGLE, algorithm), 4)[steps]
        (taken,) = ranks.run(rates, spec, batches, path, saved_after, parallel=SINGLE)
        found += [(metrics["actor/lr"], metrics["critic/lr"]) for metrics, _ in taken]
    shares = [4 / 17, 8 / 17, 3 / 5, 4 / 5]  # of the last update of each step
    expected = [(decayed("linear", share), decayed("cosine", share)) for share in shares]
    assert found == [pytest.approx(each) for each in expected]


@pytest.mark.parametrize("saved_after", [1, 2, 4], ids=["critic alone", "before the first update", "policy"])
def test_the_schedule_of_the_policy_begins_after_the_warm_up_of_the_critic(ranks, tmp_path, saved_after):
    model, path = save_model("qwen3_tied", tmp_path / "model"), str(tmp_path / "saved")
    sizes = {"group_size": 4, "prompts_per_step": 4, "num_mini_batches": 2}
    algorithm = AlgorithmConfig.model_validate({**sizes, "advantage": "gae", "filter": "none"})
    spec = trainer_spec(model, SINGLE, algorithm, decay="linear", warmup_steps=4)
    critic = CriticConfig(optimizer=CriticOptimizerConfig(learning_rate=PEAK, decay="linear"), warmup_steps=2)
    spec = replace(spec, config=spec.config.model_copy(update={"critic": critic}), total_updates=6 * 2)
    batches = steps_of(batch_for(SINGLE, algorithm), 6)
    (whole,) = ranks.run(rates, spec, batches, path, saved_after, parallel=SINGLE)
    assert [position for _, position in whole] == [0, 0, 2, 4, 6, 8]
    # of each step's last update: 4 updates of warm-up, then a line that would reach 0 one update after the run
    expected = [0.0, 0.0, PEAK / 2, PEAK, decayed("linear", 2 / 5), decayed("linear", 4 / 5)]
    assert [metrics["actor/lr"] for metrics, _ in whole] == pytest.approx(expected)
    assert [metrics["critic/lr"] for metrics, _ in whole] == pytest.approx(
        [decayed("linear", 2 * step / 13) for step in range(1, 7)]
    )
    (resumed,) = ranks.run(rates, spec, batches[saved_after:], path, None, parallel=SINGLE)
    names = ("actor/lr", "critic/lr")
    found, expected = (
        [(*(metrics[name] for name in names), position) for metrics, position in steps]
        for steps in (resumed, whole[saved_after:])
    )
    assert found == expected


def one_step(position, parallel, spec, batch):
    """Weights before and after one step, the clipped gradient's norm as the first moments have it, and the metric."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    weights = [{name: p.detach().clone() for name, p in trainer._model.named_parameters()}]
    result = trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    weights.append({name: p.detach().clone() for name, p in trainer._model.named_parameters()})
    adam = trainer._policy.optimizer.chained_optimizers[0].optimizer
    moments = [state["exp_avg"].norm() for state in adam.state.values()]
    norm = float(torch.stack(moments).norm()) / (1 - spec.config.optimizer.beta1)
    return *weights, norm, result.metrics["actor/grad_norm"]


def test_weight_decay_shrinks_matrices_and_no_vectors_by_rate_times_decay(ranks, tmp_path):
    model, batch = save_model("qwen3_tied", tmp_path), batch_for(SINGLE, ALGORITHM)
    (plain, decayed) = (
        ranks.run(one_step, trainer_spec(model, SINGLE, ALGORITHM, weight_decay=decay), batch, parallel=SINGLE)[0]
        for decay in (0.0, 0.5)
    )
    before = plain[0]
    for name, weight in before.items():
        shrunk = weight * (1e-2 * 0.5 if weight.dim() > 1 else 0.0)
        torch.testing.assert_close(plain[1][name] - decayed[1][name], shrunk, rtol=1e-3, atol=1e-6, msg=name)


def test_a_gradient_above_the_bound_is_scaled_to_it_and_reported_as_it_was(ranks, tmp_path):
    model, batch = save_model("qwen3_tied", tmp_path), batch_for(SINGLE, ALGORITHM)
    found = {}
    for bound in (0.0, 0.25, 1000.0):
        spec = trainer_spec(model, SINGLE, ALGORITHM, clip_grad=bound)
        ((_, _, *found[bound]),) = ranks.run(one_step, spec, batch, parallel=SINGLE)
    unclipped, reported = found[0.0]
    assert 1.0 < reported < 1000.0
    assert unclipped == pytest.approx(reported, rel=1e-4)
    assert found[1000.0] == pytest.approx([reported, reported], rel=1e-4)
    assert found[0.25] == pytest.approx([0.25, reported], rel=1e-4)
