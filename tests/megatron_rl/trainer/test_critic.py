"""The critic on trainer ranks: one regression under several partitions, saved and resumed under another."""

from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithm.value_loss import ValueInputs, value_loss
from megatron_rl.config import AlgorithmConfig, CriticConfig, CriticOptimizerConfig, ParallelConfig
from tests.megatron_rl.trainer.test_trainer import DP2, batch_for, trainer_spec
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import save_model

PPO = {"group_size": 4, "prompts_per_step": 4, "advantage": {"name": "gae", "lam": 0.9}, "filter": "none"}
ALGORITHM = AlgorithmConfig.model_validate(PPO)
SINGLE, TP2_PP2 = ParallelConfig(), ParallelConfig(tensor=2, pipeline=2)
BEFORE_SAVE, AFTER_SAVE = 4, 2
"""Updates."""


def critic_spec(directory, parallel, *, distributed=False):
    spec = trainer_spec(directory, parallel, ALGORITHM)
    optimizer = CriticOptimizerConfig(learning_rate=3e-3, distributed=distributed)
    config = spec.config.model_copy(update={"critic": CriticConfig(optimizer=optimizer, clip_value=0.0)})
    return replace(spec, config=config)


def targets_of(mini, old_values):
    """Every token's return is its sample's reward; the mean is over tokens."""
    from megatron_rl.trainer.critic import ValueTargets

    return [
        ValueTargets(
            old_values=micro.real(old),
            returns=micro.rewards.repeat_interleave(micro.lengths),
            shares=torch.full_like(micro.advantages, 1.0 / mini.num_tokens),
        )
        for micro, old in zip(mini.micro_batches, old_values, strict=False)
    ]


def regress(position, parallel, spec, batch, num_updates, *, load="", saved=""):
    """Metrics of each of `num_updates` updates, after the checkpoint `load`; the critic is saved in `saved` before
    the last `AFTER_SAVE` ones.
    """
    from megatron_rl.model.parallel import device
    from megatron_rl.trainer.loaded_batch import load_mini_batch
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    if load:
        trainer.load(load)
    (mini,) = batch.of_rank(trainer.data_rank).mini_batches
    mini = load_mini_batch(mini, lambda refs: refs, multiple_of=trainer.row_multiple, device=device())
    critic, found = trainer._further.critic, []
    for number in range(num_updates):
        if saved and number == num_updates - AFTER_SAVE:
            save(trainer, saved)
        step = critic.begin_step([mini], [targets_of(mini, critic.values(mini.micro_batches))])
        step.update(0)
        found.append(step.finish(configured=1))
    return found


@pytest.fixture(scope="module")
def regressions(ranks, tmp_path_factory):
    """The metrics of a regression in one process, and in four, which began from its checkpoint; and those of two."""
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen3_tied", directory)
    saved, num_updates = str(directory / "saved"), BEFORE_SAVE + AFTER_SAVE
    batch = batch_for(SINGLE, ALGORITHM, max_tokens=400)
    (whole,) = ranks.run(run_saving, critic_spec(directory, SINGLE), batch, num_updates, saved, parallel=SINGLE)
    resumed = ranks.run(
        run_loading, critic_spec(directory, TP2_PP2), batch_for(TP2_PP2, ALGORITHM), AFTER_SAVE, saved, parallel=TP2_PP2
    )[-1]
    split = ranks.run(
        regress, critic_spec(directory, DP2, distributed=True), batch_for(DP2, ALGORITHM), num_updates, parallel=DP2
    )[-1]
    return whole, resumed, split


def run_saving(position, parallel, spec, batch, num_updates, path):
    return regress(position, parallel, spec, batch, num_updates, saved=path)


def run_loading(position, parallel, spec, batch, num_updates, path):
    return regress(position, parallel, spec, batch, num_updates, load=path)


def test_a_regression_lowers_the_loss(regressions):
    whole, _, _ = regressions
    assert whole[0]["critic/values/mean"] == 0.0
    assert whole[0]["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
    losses = [step["critic/vf_loss"] for step in whole]
    assert losses[-1] < 0.7 * losses[0]
    assert whole[-1]["critic/vf_explained_var"] > 0.3


def test_gradients_are_the_same_over_data_parallel_ranks_and_other_micro_batches(regressions):
    whole, _, split = regressions
    for key in ("critic/grad_norm", "critic/vf_loss", "critic/returns/mean"):
        # the first update moves the head alone, the second one all layers; later ones differ by rounding
        assert [step[key] for step in split[:2]] == pytest.approx([step[key] for step in whole[:2]], rel=1e-5, abs=1e-6)


def test_a_critic_resumes_under_another_partition(regressions):
    whole, resumed, _ = regressions
    for key in ("critic/vf_loss", "critic/grad_norm", "critic/lr", "critic/values/mean"):
        expected = [step[key] for step in whole[-AFTER_SAVE:]]
        assert [step[key] for step in resumed] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_resume_with_another_kind_of_optimizer_of_the_critic_names_its_key(ranks, tmp_path):
    directory, saved = save_model("qwen3_tied", tmp_path / "model"), str(tmp_path / "saved")
    batch = batch_for(SINGLE, ALGORITHM, max_tokens=400)
    ranks.run(run_saving, critic_spec(directory, SINGLE), batch, AFTER_SAVE, saved, parallel=SINGLE)
    message = r"trainer\.critic\.optimizer\.distributed=false, but it is true now; set it to false"
    with pytest.raises(RuntimeError, match=message):
        ranks.run(run_loading, critic_spec(directory, SINGLE, distributed=True), batch, 1, saved, parallel=SINGLE)


def perturbed_step(position, parallel, spec, batch):
    """Metrics of a step of PPO whose head is not zero and whose reference is not the policy."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    critic = trainer._further.critic.model.chunks[0].module
    if critic.post_process:
        critic.output_layer.weight.data.copy_(torch.linspace(-0.2, 0.3, 64)[None])
    for weight in trainer._further.reference.weights().values():
        weight.mul_(1.02)
    return trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs).metrics


def test_a_step_of_ppo_is_the_same_under_every_partition(ranks, tmp_path):
    save_model("qwen3_tied", tmp_path)
    algorithm = AlgorithmConfig.model_validate(
        {**PPO, "kl": {"place": "loss", "coefficient": 0.1}, "correction": {"mode": "none"}}
    )
    found = {}
    for parallel, max_tokens in ((SINGLE, 400), (TP2_PP2, 40), (DP2, 30)):
        spec = replace(critic_spec(tmp_path, parallel), algorithm=algorithm)
        batch = batch_for(parallel, algorithm, max_tokens=max_tokens)
        found[parallel] = ranks.run(perturbed_step, spec, batch, parallel=parallel)[-1]
    expected = found.pop(SINGLE)
    assert expected["actor/kl_loss"] > 1e-4
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "critic/grad_norm", "critic/vf_loss"):
        assert [metrics[key] for metrics in found.values()] == pytest.approx([expected[key]] * 2, rel=1e-5, abs=1e-7)


def warm_up(position, parallel, spec, batch):
    """Metrics of two steps with versions 0 and 1, and whether the first one has changed the policy."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    before = [p.detach().clone() for p in trainer._model.parameters()]
    first = trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    is_changed = not all(p.equal(old) for p, old in zip(trainer._model.parameters(), before, strict=True))
    second = trainer.train(replace(batch, policy_version=1).of_rank(trainer.data_rank), lambda refs: refs)
    return first, second, is_changed


def test_the_critic_warms_up_alone_and_a_reference_like_the_policy_costs_nothing(ranks, tmp_path):
    save_model("qwen3_tied", tmp_path)
    algorithm = AlgorithmConfig.model_validate({**PPO, "kl": {"place": "loss", "coefficient": 0.1}})
    spec = replace(critic_spec(tmp_path, SINGLE), algorithm=algorithm)
    critic = spec.config.critic.model_copy(update={"warmup_steps": 1})
    spec = replace(spec, config=spec.config.model_copy(update={"critic": critic}))
    ((first, second, is_changed),) = ranks.run(warm_up, spec, batch_for(SINGLE, algorithm))
    assert (first.num_optimizer_steps, second.num_optimizer_steps, is_changed) == (0, 1, False)
    assert "actor/grad_norm" not in first.metrics
    assert first.metrics["critic/grad_norm"] > 0
    assert first.metrics["rollout_corr/kl"] != 0
    assert second.metrics["actor/kl_loss"] == 0.0
    plain = AlgorithmConfig.model_validate(PPO)
    ((_, without, _),) = ranks.run(warm_up, replace(spec, algorithm=plain), batch_for(SINGLE, plain))
    assert second.metrics["actor/grad_norm"] == pytest.approx(without.metrics["actor/grad_norm"], rel=1e-5)


def test_a_coefficient_does_not_adapt_to_a_policy_that_has_not_moved(ranks, tmp_path):
    save_model("qwen3_tied", tmp_path)
    kl = {"place": "reward", "coefficient": 0.1, "target": 0.05}
    algorithm = AlgorithmConfig.model_validate({**PPO, "kl": kl})
    spec = replace(critic_spec(tmp_path, SINGLE), algorithm=algorithm)
    critic = spec.config.critic.model_copy(update={"warmup_steps": 1})
    spec = replace(spec, config=spec.config.model_copy(update={"critic": critic}))
    ((first, second, _),) = ranks.run(warm_up, spec, batch_for(SINGLE, algorithm))
    assert first.metrics["actor/reward_kl_penalty"] == 0.0
    assert first.metrics["actor/kl_coef"] == second.metrics["actor/kl_coef"] == 0.1


def test_the_value_loss_is_half_the_larger_of_both_squares():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(50, generator=generator) for _ in range(3))
    values.requires_grad_()
    inputs = ValueInputs(
        values=values, old_values=old, returns=returns, coefficients=torch.full((50,), 1 / 50), num_tokens=50
    )
    loss, metrics = value_loss(inputs, clip=0.2)
    expected, clipped = 0.0, 0
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        near = o + max(-0.2, min(0.2, v - o))
        expected += 0.5 * max((v - r) ** 2, (near - r) ** 2) / 50
        clipped += (near - r) ** 2 > (v - r) ** 2
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(clipped / 50)
    (gradient,) = torch.autograd.grad(loss, values)
    assert int((gradient == 0).sum()) == clipped
