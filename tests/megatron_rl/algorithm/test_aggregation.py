"""Aggregations against naive means of padded rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm_settings import AGGREGATIONS
from tests.support.loss_inputs import MAX_RESPONSE_TOKENS, column, shares


def naive_aggregation(losses, mask, aggregation):
    """Of padded rows, as in verl's `agg_loss`: only sequences with a counted token count."""
    sequences = mask.any(axis=1).sum()
    match aggregation:
        case "token_mean":
            return (losses * mask).sum() / mask.sum()
        case "sequence_mean":
            return sum(row[of_row].mean() for row, of_row in zip(losses, mask, strict=True) if of_row.any()) / sequences
        case "seq_mean_token_sum":
            return (losses * mask).sum() / sequences
        case "seq_mean_token_sum_norm":
            return (losses * mask).sum() / sequences / MAX_RESPONSE_TOKENS


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), aggregation=st.sampled_from(list(AGGREGATIONS.by_name)))
def test_the_aggregation_of_counted_tokens_equals_a_naive_one_of_padded_rows(seed, aggregation):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, MAX_RESPONSE_TOKENS + 1, 6)
    losses = rng.normal(size=(6, MAX_RESPONSE_TOKENS))
    mask = np.arange(MAX_RESPONSE_TOKENS) < lengths[:, None]
    real, mask = mask, mask & (rng.random(losses.shape) < 0.7) & (rng.random((6, 1)) < 0.8)
    if not mask.any():
        return
    packed = shares(
        torch.as_tensor(lengths),
        aggregation=aggregation,
        counted=torch.as_tensor(mask[real]),
        num_tokens=int(mask.sum()),
        num_sequences=int(mask.any(axis=1).sum()),
    )
    assert float((packed * column(losses[real])).sum()) == pytest.approx(
        naive_aggregation(losses, mask, aggregation), rel=1e-4, abs=1e-6
    )


def test_the_constant_of_the_normalised_sum_can_be_given():
    lengths = torch.tensor([2, 3])
    packed = shares(lengths, aggregation={"name": "seq_mean_token_sum_norm", "constant": 50})
    assert packed.tolist() == pytest.approx([0.01] * 5)
