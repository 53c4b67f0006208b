"""The reference policy on trainer ranks: bitwise the weights that it was made of, and the policy is left as it was."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config import AlgorithmConfig, ParallelConfig, ReferenceConfig
from tests.megatron_rl.trainer.test_trainer import DP2, TP2, batch_for, trainer_spec
from tests.support.trainers.saves import save
from tests.support.trainers.tiny_megatron_models import save_model

ALGORITHM = AlgorithmConfig.model_validate({"group_size": 4, "prompts_per_step": 4, "kl": {"place": "loss"}})
PP2 = ParallelConfig(pipeline=2)


def reference_spec(directory, parallel, *, place, distributed=False):
    spec = trainer_spec(directory, parallel, ALGORITHM, distributed=distributed)
    config = spec.config.model_copy(update={"reference": ReferenceConfig(place=place, refresh_every=2)})
    return replace(spec, config=config)


def scores_of(trainer, batch):
    """Log-probabilities of this rank's samples: under the policy, and under the reference."""
    from megatron_rl.model.parallel import device
    from megatron_rl.trainer.loaded_batch import load_mini_batch

    found = []
    for mini in batch.of_rank(trainer.data_rank).mini_batches:
        loaded = load_mini_batch(mini, lambda refs: refs, multiple_of=trainer.row_multiple, device=device())
        for scores in (trainer._learner.logprobs, trainer._further.reference.logprobs):
            found.append([each.numpy() for each in scores(loaded.micro_batches)])
    return found


def train_and_refresh(position, parallel, spec, batch, path):
    """(policy's, reference's) log-probabilities at the start, after a step and after a refresh, which is saved."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    found = [scores_of(trainer, batch)]
    trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    before = {name: p.detach().clone() for name, p in trainer._model.named_parameters()}
    found.append(scores_of(trainer, batch))
    assert all(p.equal(before[name]) for name, p in trainer._model.named_parameters())
    trainer._further.reference.refresh()
    save(trainer, path)
    trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    trainer.offload(("gradients", "optimizer", "weights"))
    trainer.onload()
    found.append(scores_of(trainer, batch))
    return found


def load_and_score(position, parallel, spec, batch, path):
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.load(path)
    return scores_of(trainer, batch)


def same(a, b, **tolerance):
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


@pytest.mark.parametrize(
    ("place", "parallel", "target", "distributed"),
    [("host", DP2, TP2, True), ("device", PP2, ParallelConfig(), False)],
)
def test_reference_scores_are_those_of_the_weights_that_it_took(ranks, tmp_path, place, parallel, target, distributed):
    save_model("qwen3_tied", tmp_path)
    path, spec = str(tmp_path / "saved"), reference_spec(tmp_path, parallel, place=place, distributed=distributed)
    start, trained, refreshed = ranks.run(
        train_and_refresh, spec, batch_for(parallel, ALGORITHM), path, parallel=parallel
    )[-1]
    same(start[1], start[0], rtol=0)
    same(trained[1], start[1], rtol=0)
    same(refreshed[1], trained[0], rtol=0)
    assert max(abs(a - b).max() for a, b in zip(trained[0], trained[1], strict=True)) > 1e-2
    other = "device" if place == "host" else "host"
    resumed = ranks.run(
        load_and_score, reference_spec(tmp_path, target, place=other, distributed=distributed),
        batch_for(target, ALGORITHM), path,
        parallel=target,
    )[-1]  # fmt: skip
    same(resumed[1], resumed[0], rtol=0)  # the checkpoint was written when both were equal


def resume_without_refreshes(position, parallel, spec, batch, path, later):
    """Scores after a resume that never refreshes the reference, which is saved again."""
    from megatron_rl.trainer.trainer import Trainer

    reference = spec.config.reference.model_copy(update={"refresh_every": 0})
    trainer = Trainer(replace(spec, config=spec.config.model_copy(update={"reference": reference})), position)
    trainer.load(path)
    save(trainer, later)
    return scores_of(trainer, batch)


def test_a_reference_that_is_refreshed_no_more_stays_the_same_over_two_resumes(ranks, tmp_path):
    save_model("qwen3_tied", tmp_path)
    spec, batch = reference_spec(tmp_path, DP2, place="host"), batch_for(DP2, ALGORITHM)
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    start, _, _ = ranks.run(train_and_refresh, spec, batch, first, parallel=DP2)[-1]
    once = ranks.run(resume_without_refreshes, spec, batch, first, second, parallel=DP2)[-1]
    twice = ranks.run(resume_without_refreshes, spec, batch, second, third, parallel=DP2)[-1]
    same(twice[1], once[1], rtol=0)
    assert max(abs(a - b).max() for a, b in zip(once[1], start[1], strict=True)) > 1e-2, "the reference had moved"


def count_exchanges(position, parallel, spec, batch):
    """Exchanges of a step's reference scores."""
    from megatron_rl.trainer.reference import HostReference
    from megatron_rl.trainer.trainer import Trainer

    trainer, exchange, count = Trainer(spec, position), HostReference._exchange, 0

    def counted(self):
        nonlocal count
        count += 1
        exchange(self)

    HostReference._exchange = counted
    try:
        result = trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    finally:
        HostReference._exchange = exchange
    return count, result.num_optimizer_steps


def test_one_exchange_serves_all_mini_batches_of_a_step(ranks, tmp_path):
    save_model("qwen3_tied", tmp_path)
    algorithm = ALGORITHM.model_copy(update={"num_mini_batches": 2})
    spec = replace(reference_spec(tmp_path, DP2, place="host"), algorithm=algorithm)
    found = ranks.run(count_exchanges, spec, batch_for(DP2, algorithm), parallel=DP2)
    assert found == [(2, 2), (2, 2)], "there and back once, for two updates"
