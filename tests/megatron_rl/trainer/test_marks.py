"""A trainer rank leaves a mark for every micro batch and every bucket."""

import os

import pytest

from rollout import progress
from rollout.types import WeightVersion
from tests.megatron_rl.trainer.test_trainer import ALGORITHMS, PP2, TP2, batch_for, trainer_spec
from tests.support.trainers.memory_sender import MemorySender
from tests.support.trainers.tiny_megatron_models import save_model


def marks(position, parallel, spec, batch):
    """(marks, newest text) after training, publishing and the probe, then numbers of micro batches and of buckets."""
    from megatron_rl.trainer.trainer import Trainer

    progress.open_page()
    trainer = Trainer(spec, position)
    trainer.plan_publishes(())
    part = batch.of_rank(trainer.data_rank)
    seen = []
    for call in (
        lambda: trainer.train(part, lambda refs: refs),
        lambda: trainer.stage(WeightVersion(1), MemorySender()),
        lambda: trainer.probe(list(range(1, 13))),
    ):
        progress.begin("call")
        call()
        now = progress.look(os.getpid(), progress.page_descriptor())
        seen.append((now.in_call, now.text))
    micro_batches = [len(mini.micro_batches) for mini in part.mini_batches]
    return seen, micro_batches, len(trainer.publishes.plan.buckets_of(position.rank))


@pytest.mark.parametrize(
    ("parallel", "name"), zip([TP2, PP2], [*ALGORITHMS][:2], strict=True), ids=["tensor", "pipeline"]
)
def test_each_micro_batch_leaves_two_marks_on_every_stage_and_each_bucket_two(ranks, tmp_path, parallel, name):
    algorithm = ALGORITHMS[name]
    save_model("qwen3", tmp_path)
    spec = trainer_spec(tmp_path, parallel, algorithm)
    outcomes = ranks.run(marks, spec, batch_for(parallel, algorithm), parallel=parallel)
    for rank, outcome in enumerate(outcomes):
        (trained, published, probed), micro_batches, num_buckets = outcome
        is_last_stage = parallel is TP2 or rank == 1
        old = 2 * sum(micro_batches) if len(micro_batches) > 1 else 0
        updates = sum(2 * count + 2 for count in micro_batches) * algorithm.num_epochs  # and gradients, optimizer
        assert sum(micro_batches) >= 2
        assert trained == (
            1 + old + updates + is_last_stage,
            f"call: {'metrics' if is_last_stage else 'optimizer step'}",
        )
        assert published == (1 + 2 * num_buckets + 2, "call: all buckets are handed over")
        assert probed == (2, "call: micro batch 1 of 1, after the forward")
