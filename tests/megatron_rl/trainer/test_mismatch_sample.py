"""Which responses are in the sample of a step, and how they are packed."""

import random

import numpy as np
import pytest
import torch

from megatron_rl.batching.batch import MicroBatch, RankBatch, RankMiniBatch
from megatron_rl.batching.selection import TrainingSample
from megatron_rl.trainer.mismatch_sample import choose, pack
from megatron_rl.trainer.probe import _published
from rollout.types import ColumnsRef, GroupId

LONG, LONGEST = 10_000, 20_480
"""Tokens of a long response, and of the longest one."""


def sample_of(number: int, num_tokens: int) -> TrainingSample:
    return TrainingSample(
        group_id=GroupId(number),
        sample=0,
        part=0,
        columns=ColumnsRef(None),
        num_prompt_tokens=0,
        num_response_tokens=num_tokens,
        advantage=0.0,
        reward=0.0,
        staleness=0,
        weight_spans=(),
    )


def batch_of(step: int, lengths: list[int]) -> RankBatch:
    samples = tuple(sample_of(number, length) for number, length in enumerate(lengths))
    mini = RankMiniBatch(
        micro_batches=(MicroBatch(samples=samples),), num_sequences=len(lengths), num_response_tokens=sum(lengths)
    )
    return RankBatch(data_rank=0, policy_version=step, mini_batches=(mini,), max_staleness=0, cap=None)


@pytest.mark.parametrize("limit", [1024, 8192, 16_384])
def test_long_responses_have_their_share_of_the_sampled_tokens(limit: int) -> None:
    """The share of tokens from long responses is within three standard errors of that in all responses."""
    generator = random.Random(0)
    in_long, in_all, population = [], [], []
    for step in range(1500):
        lengths = [min(LONGEST, int(generator.lognormvariate(8.6, 0.9))) for _ in range(48)]
        chosen = [sample.num_tokens for sample in choose(batch_of(step, lengths), limit_tokens=limit)]
        in_long.append(sum(length for length in chosen if length > LONG))
        in_all.append(sum(chosen))
        population += lengths
    expected = sum(length for length in population if length > LONG) / sum(population)
    residuals = np.array(in_long) - expected * np.array(in_all)
    error = np.sqrt((residuals**2).sum()) / sum(in_all)
    assert abs(sum(in_long) / sum(in_all) - expected) < 3 * error
    assert error < 0.02


def test_a_sample_ends_with_the_response_that_reaches_the_limit() -> None:
    lengths = [300, 200, 700, 100, 50]
    assert [len(choose(batch_of(0, lengths), limit_tokens=limit)) for limit in (1, 10_000)] == [1, 5]
    for limit in range(1, 1400):
        *before, last = (sample.num_tokens for sample in choose(batch_of(3, lengths), limit_tokens=limit))
        assert sum(before) < limit and (sum(before) + last >= limit or len(before) == 4)
    assert choose(batch_of(0, []), limit_tokens=5) == []


def test_micro_batches_keep_the_order_and_hold_the_limit_or_one_longer_response() -> None:
    samples = [sample_of(number, length) for number, length in enumerate([4, 6, 1, 30, 2, 3, 5, 1])]
    packed = pack(samples, max_tokens=10)
    assert [[sample.num_tokens for sample in micro.samples] for micro in packed] == [[4, 6], [1], [30], [2, 3, 5], [1]]
    assert [sample for micro in packed for sample in micro.samples] == samples
    assert [micro.samples for micro in pack([], max_tokens=10)] == [()]


class SmallModel(torch.nn.Module):
    """The parts of a policy into which published values are swapped."""

    pre_process = post_process = True
    share_embeddings_and_output_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(2, 2, bias=False)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])
        self.decoder.forward = self.decoder.layers[0].__call__
        self.output_layer = torch.nn.Linear(2, 2, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.decoder(self.embedding(states)))


def test_further_micro_batches_keep_one_published_output_weight():
    model, asked = SmallModel(), []

    def published(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.full((2, 2), 2.0)

    own = model.output_layer.weight
    with _published([model], published):
        first = model(torch.ones(1, 2))
        assert torch.equal(model(torch.ones(1, 2)), first) and first.tolist() == [[64.0, 64.0]]
    assert asked.count("output_layer.weight") == 1 and model.output_layer.weight is own
