"""The policy's optimizer follows its configuration: warm-up and decay across a resume, weight decay, clip."""

from dataclasses import replace

import pytest
import torch

from megatron_rl.config import ParallelConfig
from tests.megatron_rl.trainer.test_trainer import ALGORITHMS, batch_for, trainer_spec
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import save_model

ALGORITHM, SINGLE = ALGORITHMS["one update"], ParallelConfig()


def rates(position, parallel, spec, batches, path, saved_after):
    """Learning rate of each step, and where the schedule stands after it, in updates. Saves after so many steps to
    `path`, or resumes from it before the first one if `saved_after` is None.
    """
    from megatron_rl.trainer.trainer import Trainer

    trainer, found = Trainer(spec, position), []
    if saved_after is None:
        trainer.load(path)
    for number, batch in enumerate(batches, start=1):
        result = trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
        found.append((result.metrics["actor/lr"], trainer._policy.schedule.num_steps))
        if number == saved_after:
            save(trainer, path)
    return found


@pytest.mark.parametrize("saved_after", [1, 3], ids=["in the warm-up", "in the decay"])
def test_a_resumed_run_goes_on_with_warm_up_and_decay_where_it_stopped(ranks, tmp_path, saved_after):
    model, path = save_model("qwen3_tied", tmp_path / "model"), str(tmp_path / "saved")
    batches = [batch_for(SINGLE, ALGORITHM)] * 5
    spec = trainer_spec(model, SINGLE, ALGORITHM, decay="linear", warmup_steps=2)
    spec = replace(spec, total_updates=5)
    (whole,) = ranks.run(rates, spec, batches, path, saved_after, parallel=SINGLE)
    # two updates of warm-up, then a line that would reach 0 one update after the run
    assert [rate for rate, _ in whole] == pytest.approx([0.5e-2, 1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    assert [position for _, position in whole] == [1, 2, 3, 4, 5]
    (resumed,) = ranks.run(rates, spec, batches[saved_after:], path, None, parallel=SINGLE)
    assert resumed == whole[saved_after:]


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
