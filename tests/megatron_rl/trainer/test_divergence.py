"""The divergence from a reference in the loss and in the reward, and coefficients that adapt to it.

The reference is the policy itself with log-probabilities shifted by a constant, so its divergence is known.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import AlgorithmConfig, ParallelConfig
from tests.megatron_rl.trainer.test_trainer import DP2, PP2, TP2, batch_for, trainer_spec
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import save_model

SIZES = {"group_size": 4, "prompts_per_step": 4}
SHIFT = 0.2
IN_LOSS = AlgorithmConfig(
    **SIZES, kl={"place": "loss", "estimator": "k3", "coefficient": 0.5, "target": 0.01, "horizon": 100}
)
IN_REWARD = AlgorithmConfig(
    **SIZES,
    advantage={"name": "discounted_returns", "gamma": 0.97},
    kl={"place": "reward", "estimator": "k1", "coefficient": 0.1, "target": 0.3, "horizon": 100},
    entropy={"coefficient": 0.01, "target": 1.0},
)
SINGLE = ParallelConfig()
GROWN = 0.5 * (1 + 0.2 * 16 / 100)
"""Coefficient after 16 responses far above the target."""


class Shifted:
    """A reference whose log-probabilities lie above the policy's by a constant."""

    def __init__(self, learner):
        self._learner = learner

    def logprobs(self, micro_batches):
        return [each + SHIFT for each in self._learner.logprobs(micro_batches)]


def trainer_with_reference(position, spec):
    from megatron_rl.model.parallel import device
    from megatron_rl.trainer.further_models import FurtherModels
    from megatron_rl.trainer.learner import Learner
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(replace(spec, algorithm=AlgorithmConfig(**SIZES)), position)
    trainer._learner = Learner(
        trainer._policy,
        algorithm=spec.algorithm,
        temperature=spec.temperature,
        max_response_tokens=spec.max_response_tokens,
        row_multiple=trainer.row_multiple,
        device=device(),
        models=FurtherModels(reference=Shifted(trainer._learner)),
    )
    return trainer


def train(position, parallel, spec, batches):
    """Metrics of every step."""
    trainer = trainer_with_reference(position, spec)
    return [trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs).metrics for batch in batches]


def steps_of(ranks, directory, parallel, algorithm):
    spec = trainer_spec(directory, parallel, algorithm)
    return ranks.run(train, spec, [batch_for(parallel, algorithm)] * 2, parallel=parallel)[-1]


def test_a_known_divergence_is_measured_and_its_coefficient_follows_it_beyond_a_resume(ranks, tmp_path: Path):
    save_model("qwen3", tmp_path / "model")
    spec, batch = trainer_spec(tmp_path / "model", SINGLE, IN_LOSS), batch_for(SINGLE, IN_LOSS)
    ((first, second, saved, loaded),) = ranks.run(resumed, spec, batch, str(tmp_path / "saved"), parallel=SINGLE)
    divergence = math.exp(SHIFT) - 1 - SHIFT
    assert first["actor/kl"] == pytest.approx(divergence, rel=1e-4)
    assert first["actor/kl_loss"] == pytest.approx(divergence, rel=1e-4)
    assert (first["actor/kl_coef"], second["actor/kl_coef"]) == pytest.approx((0.5, GROWN))
    assert saved == loaded
    assert saved["kl"] == pytest.approx(GROWN * (1 + 0.2 * 16 / 100))


def resumed(position, parallel, spec, batch, path):
    """Metrics of two steps, the coefficients after them, and those of another trainer that has loaded the save."""
    trainer, other = trainer_with_reference(position, spec), trainer_with_reference(position, spec)
    steps = [trainer.train(batch.of_rank(0), lambda refs: refs).metrics for _ in range(2)]
    save(trainer, path)
    other.load(path)
    return *steps, trainer._learner.saved_coefficients(), other._learner.saved_coefficients()


def test_a_divergence_in_the_reward_is_the_same_under_every_partition(ranks, tmp_path: Path):
    save_model("qwen3", tmp_path)
    single = steps_of(ranks, tmp_path, SINGLE, IN_REWARD)
    assert single[0]["actor/reward_kl_penalty"] == pytest.approx(-SHIFT, rel=1e-4)
    assert single[0]["actor/reward_kl_bounded"] == 0
    assert single[1]["actor/kl_coef"] < single[0]["actor/kl_coef"]
    names = ("pg_loss", "grad_norm", "entropy", "reward_kl_penalty", "kl_coef", "entropy_coeff")
    for parallel in (DP2, PP2, TP2):
        split = steps_of(ranks, tmp_path, parallel, IN_REWARD)
        for step, tolerance in enumerate((1e-5, 1e-3)):
            found, expected = ([each[step][f"actor/{name}"] for name in names] for each in (split, single))
            assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_a_missing_model_is_refused_when_the_trainer_is_built(ranks, tmp_path: Path):
    save_model("qwen3", tmp_path)
    spec = trainer_spec(tmp_path, SINGLE, AlgorithmConfig(**SIZES, advantage="gae"))
    with pytest.raises(RuntimeError, match="needs the column `values`, but the trainer has no model of it"):
        ranks.run(build_alone, spec, parallel=SINGLE)


def build_alone(position, parallel, spec):
    from megatron_rl.trainer.further_models import POLICY_ONLY
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(replace(spec, algorithm=AlgorithmConfig(**SIZES)), position)
    trainer.spec, trainer._further = spec, POLICY_ONLY
    trainer._build_learner()
