"""Logits of the Megatron model against those of transformers, in FP32, for every family and partition."""

import itertools

import numpy as np
import pytest
import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.model.packed_batch import pack_batch
from tests.support.trainers.rank_functions import build_loaded, full_logits
from tests.support.trainers.tiny_megatron_models import FAMILIES, VOCAB, reference_logits, save_model

PARTITIONS = {
    "tp1": (ParallelConfig(), False),
    "tp2": (ParallelConfig(tensor=2), False),
    "tp2_sp": (ParallelConfig(tensor=2), True),
    "pp2": (ParallelConfig(pipeline=2), False),
    "tp2_pp2": (ParallelConfig(tensor=2, pipeline=2), False),
    "tp2_pp2_sp": (ParallelConfig(tensor=2, pipeline=2), True),
}


def samples(seed, lengths):
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, VOCAB, prompt, dtype=np.int32), rng.integers(0, VOCAB, response, dtype=np.int32))
        for prompt, response in lengths
    ]


MICRO_BATCHES = [samples(0, [(5, 9), (1, 1), (20, 70)]), samples(1, [(3, 4)])]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By family: the model's directory, and its reference logits of each micro batch."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for family in (*FAMILIES, "qwen3_moe_raw"):
        directory = save_model(family, root / family)
        found[family] = directory, [reference_logits(directory, [np.concatenate(s) for s in b]) for b in MICRO_BATCHES]
    return found


@pytest.mark.parametrize(("partition", "family"), [("tp1", "qwen3_moe_raw"), *itertools.product(PARTITIONS, FAMILIES)])
def test_packed_logits_of_every_partition_equal_those_of_hugging_face(ranks, models, family, partition):
    directory, references = models[family]
    parallel, sequence_parallel = PARTITIONS[partition]
    if "moe" in family and parallel.tensor > 1:
        sequence_parallel = True  # Megatron trains experts over tensor ranks with it only, and we always have it there
    batches = [pack_batch(batch, multiple_of=2) for batch in MICRO_BATCHES]
    results = ranks.run(full_logits, directory, batches, sequence_parallel, parallel=parallel)
    (logits,) = [result for result in results if result is not None]
    for found, expected in zip(logits, references, strict=True):
        torch.testing.assert_close(torch.from_numpy(found[: len(expected)]), expected, atol=1e-4, rtol=1e-4)


def test_bf16_scores_stay_near_fp32_ones(ranks, models):
    directory, references = models["qwen3_tied"]
    batch = MICRO_BATCHES[0]
    (scores,) = ranks.run(bf16_scores, directory, pack_batch(batch))
    expected, start = [], 0
    for prompt, response in batch:
        rows = references[0][start + len(prompt) - 1 : start + len(prompt) + len(response) - 1].log_softmax(dim=1)
        expected.append(rows.gather(1, torch.from_numpy(response).long()[:, None])[:, 0])
        start += len(prompt) + len(response)
    assert (torch.from_numpy(scores) - torch.cat(expected)).abs().mean() < 0.1


def bf16_scores(position, parallel, directory, batch):
    model = build_loaded(position, parallel, directory, dtype="bf16")
    with torch.no_grad():
        return model(batch, temperature=1.0).logprobs.numpy()
