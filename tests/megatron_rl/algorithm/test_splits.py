"""Every loss has the same gradient and metrics under any split of a mini batch, in one process."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.columns import Columns, LossInputs
from megatron_rl.algorithm.correction import PackedLogprobs, correction_weights
from megatron_rl.algorithm.objective import Terms, objective
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm_settings import AGGREGATIONS, LOSSES
from megatron_rl.batching.balance import PackingRules
from megatron_rl.batching.batch import build_batch
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.config import AlgorithmConfig, CorrectionConfig
from tests.megatron_rl.batching.test_batch import scored_group
from tests.support.loss_inputs import column, shares

COSTS = CostModel(parity_tokens=1000)
VOCABULARY, WIDTH = 11, 6
COLUMNS = ("old", "rollout", "ref")


class Policy(torch.nn.Module):
    """Predicts the next token from the previous one: the smallest model whose parameters all tokens share."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.output = torch.nn.Parameter(torch.randn(WIDTH, VOCABULARY, generator=generator) * 0.5)

    def forward(self, previous, targets):
        logits = torch.tanh(self.embedding[previous]) @ self.output
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def micro_inputs(policy, micro, mini, tokens, config):
    """Inputs of the loss, and weights of the correction, of one micro batch."""
    rows = [tokens[sample.group_id, sample.sample] for sample in micro.samples]
    lengths = torch.tensor([len(row["targets"]) for row in rows], dtype=torch.int64)

    def joined(name, dtype=torch.float32):
        parts = [torch.as_tensor(row[name], dtype=dtype) for row in rows]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)

    logprobs, entropy = policy(joined("previous", torch.int64), joined("targets", torch.int64))
    old, rollout, ref = (joined(name) for name in COLUMNS)
    pair = PackedLogprobs(old_logprobs=old, rollout_logprobs=rollout, lengths=lengths)
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=column([s.advantage for s in micro.samples]).repeat_interleave(lengths),
        coefficients=shares(
            lengths,
            aggregation=config.aggregation,
            num_tokens=mini.num_response_tokens,
            num_sequences=mini.num_sequences,
        ),
        loss_mask=torch.ones(len(old), dtype=torch.bool),
        staleness=torch.zeros_like(lengths),
        lengths=lengths,
        num_tokens=mini.num_response_tokens,
        further=Columns(tensors={"ref": ref}),
    )
    return inputs, correction_weights(pair, config=config.correction)


def gradient_of(batch, tokens, config):
    """Gradient accumulated over ranks and micro batches by sums alone, as in a trainer."""
    policy = Policy()
    metrics: dict[str, float] = {}
    loss = load_stage(LOSSES, config.loss).function
    terms = Terms(kl_estimator=config.kl.estimator, kl_coefficient=0.1, entropy_coefficient=0.01)
    for mini in batch.mini_batches:
        for micro in (micro for rank in mini.micro_batches for micro in rank):
            inputs, weights = micro_inputs(policy, micro, mini, tokens, config)
            result = objective(loss, inputs, weights=weights, terms=terms)
            result.loss.backward()
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), metrics


def random_groups(rng):
    """Six groups of four responses, the first without signal, and the columns of their tokens."""
    groups, tokens = [], {}
    for group_id in range(6):
        lengths = rng.integers(1, 20, 4).tolist()
        rewards = rng.integers(0, 2, 4).astype(float).tolist() if group_id else [1.0] * 4
        groups.append(
            scored_group(group_id, lengths, rewards if len(set(rewards)) > 1 or not group_id else [0, 1, 0, 1])
        )
        for sample, length in enumerate(lengths):
            row = {"previous": rng.integers(0, VOCABULARY, length), "targets": rng.integers(0, VOCABULARY, length)}
            with torch.no_grad():
                new, _ = Policy()(torch.as_tensor(row["previous"]), torch.as_tensor(row["targets"]))
            row["old"] = new.numpy() + rng.normal(0, 0.2, length)
            row["rollout"] = row["old"] + rng.normal(0, 0.01, length)
            row["ref"] = row["old"] + rng.normal(0, 0.3, length)
            tokens[group_id, sample] = row
    return groups, tokens


@pytest.mark.parametrize("loss", LOSSES.by_name)
@pytest.mark.parametrize("aggregation", AGGREGATIONS.by_name)
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dp_size=st.integers(1, 3),
    max_tokens=st.integers(8, 60),
    mode=st.sampled_from(["none", "tis_token", "tis_sequence", "mis_geometric"]),
    estimator=st.sampled_from(["k1", "k2", "k3", "k3_unbiased"]),
)
def test_gradient_and_metrics_are_equal_under_any_split(loss, aggregation, seed, dp_size, max_tokens, mode, estimator):
    groups, tokens = random_groups(np.random.default_rng(seed))
    config = AlgorithmConfig(
        loss=loss,
        aggregation=aggregation,
        kl={"estimator": estimator},
        correction=CorrectionConfig(mode=mode, cap=1.01, low=1 / 1.01),
    )

    def batch(dp_size, max_tokens):
        rules = PackingRules(num_ranks=dp_size, max_tokens=max_tokens, costs=COSTS)
        return build_batch(groups, 0, algorithm=config, rules=rules, seed=1)

    whole, whole_metrics = gradient_of(batch(1, 10**6), tokens, config)
    split, split_metrics = gradient_of(batch(dp_size, max_tokens), tokens, config)
    assert batch(dp_size, max_tokens).counts.zero_variance_groups == 1
    assert float((split - whole).norm() / whole.norm()) < 1e-5
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)
