"""A reference policy and a critic beside the policy: known divergences, equal learning under every partition.

The models are functions of the policy's own log-probabilities, so they are equal under every partition and exist on the
last pipeline stage only, as those of real models.
"""

import math
from pathlib import Path

import pytest

from megatron_rl.config import AlgorithmConfig, ParallelConfig
from tests.megatron_rl.trainer.test_trainer import DP2, PP2, TP2, batch_for, trainer_spec
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import save_model

SIZES = {"group_size": 4, "prompts_per_step": 4}
SHIFT = 0.2
WITH_KL = AlgorithmConfig(
    **SIZES, kl={"place": "loss", "estimator": "k3", "coefficient": 0.5, "target": 0.01, "horizon": 100}
)
WITH_CRITIC = AlgorithmConfig(
    **SIZES,
    advantage={"name": "gae", "gamma": 0.97, "lam": 0.9},
    filter="none",
    kl={"place": "reward", "estimator": "k1", "coefficient": 0.1, "target": 0.3, "horizon": 100},
    entropy={"coefficient": 0.01, "target": 1.0},
)


class Shifted:
    """A reference policy whose log-probabilities lie above the policy's by a constant, and a critic made of them."""

    def __init__(self, learner):
        self._learner = learner

    def logprobs(self, micro_batches):
        return [each + SHIFT for each in self._learner.logprobs(micro_batches)]

    def values(self, micro_batches):
        return [0.3 * each for each in self._learner.logprobs(micro_batches)]


def learner_of(position, spec, algorithm):
    from dataclasses import replace

    from megatron_rl.model.parallel import device
    from megatron_rl.trainer.further_models import FurtherModels
    from megatron_rl.trainer.learner import Learner
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(replace(spec, algorithm=AlgorithmConfig()), position)
    policy = trainer._learner
    models = Shifted(policy)
    learner = Learner(
        policy.chunks,
        policy.optimizer,
        policy.schedule,
        algorithm=algorithm,
        temperature=spec.temperature,
        max_response_tokens=spec.max_response_tokens,
        row_multiple=trainer.row_multiple,
        device=device(),
        models=FurtherModels(reference=models, values=models),
    )
    trainer._learner = learner
    return trainer, learner


def train(position, parallel, spec, batches):
    """Metrics of every step."""
    trainer, learner = learner_of(position, spec, spec.algorithm)
    return [learner.train(batch.of_rank(trainer.data_rank), lambda refs: refs).metrics for batch in batches]


def steps_of(ranks, directory, parallel, algorithm):
    spec = trainer_spec(directory, parallel, algorithm)
    return ranks.run(train, spec, [batch_for(parallel, algorithm)] * 2, parallel=parallel)[-1]


def test_a_constant_shift_of_the_reference_has_a_known_divergence_that_the_coefficient_follows(ranks, tmp_path: Path):
    save_model("qwen3", tmp_path)
    first, second = steps_of(ranks, tmp_path, ParallelConfig(), WITH_KL)
    divergence = math.exp(SHIFT) - 1 - SHIFT
    assert first["actor/kl"] == pytest.approx(divergence, rel=1e-4)
    assert first["actor/kl_loss"] == pytest.approx(divergence, rel=1e-4)
    assert (first["actor/kl_coef"], second["actor/kl_coef"]) == pytest.approx((0.5, 0.5 * (1 + 0.2 * 16 / 100)))


@pytest.mark.parametrize("parallel", [DP2, PP2, TP2], ids=["data", "pipeline", "tensor"])
def test_reference_and_critic_give_the_same_learning_under_every_partition(ranks, tmp_path: Path, parallel):
    save_model("qwen3", tmp_path)
    single = steps_of(ranks, tmp_path, ParallelConfig(), WITH_CRITIC)
    split = steps_of(ranks, tmp_path, parallel, WITH_CRITIC)
    names = ("pg_loss", "grad_norm", "entropy", "reward_kl_penalty", "kl_coef", "entropy_coeff")
    for step, tolerance in enumerate((1e-5, 1e-3)):
        expected = [single[step][f"actor/{name}"] for name in names]
        assert [split[step][f"actor/{name}"] for name in names] == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert single[0]["actor/reward_kl_penalty"] == pytest.approx(-SHIFT, rel=1e-4)
    assert single[1]["actor/kl_coef"] < single[0]["actor/kl_coef"]


def test_a_missing_model_is_refused_when_the_trainer_is_built(ranks, tmp_path: Path):
    save_model("qwen3", tmp_path)
    with pytest.raises(RuntimeError, match="needs the column `ref`, but the trainer was built without its model"):
        ranks.run(build_alone, trainer_spec(tmp_path, ParallelConfig(), WITH_CRITIC), parallel=ParallelConfig())


def build_alone(position, parallel, spec):
    from megatron_rl.trainer.trainer import Trainer

    Trainer(spec, position)


def test_coefficients_continue_after_a_resume(ranks, tmp_path: Path):
    save_model("qwen3", tmp_path / "model")
    spec = trainer_spec(tmp_path / "model", ParallelConfig(), WITH_KL)
    batch = batch_for(ParallelConfig(), WITH_KL)
    (found,) = ranks.run(coefficients_after, spec, batch, tmp_path / "saved", parallel=ParallelConfig())
    assert found[0] == found[1]
    assert found[0]["kl"] == pytest.approx(0.5 * (1 + 0.2 * 16 / 100))


def coefficients_after(position, parallel, spec, batch, path):
    """Of a trainer that has trained for a step, and of another one that has loaded what the first one saved."""
    trainer, learner = learner_of(position, spec, spec.algorithm)
    learner.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    save(trainer, str(path))
    resumed, loaded = learner_of(position, spec, spec.algorithm)
    resumed.load(str(path))
    return learner.coefficients.state_dict(), loaded.coefficients.state_dict()
