"""Policy losses: against five-line references, and the same gradient under any split of a mini batch."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.correction import PackedLogprobs, correction_weights
from megatron_rl.algorithm.loss import (
    Denominators,
    LossInputs,
    LossSettings,
    cispo,
    clipped_surrogate,
    coefficients,
    gspo,
    load_loss,
    sft_loss,
)
from megatron_rl.batching.balance import PackingRules
from megatron_rl.batching.batch import build_batch
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.built_in import LOSSES
from megatron_rl.config import Aggregation, AlgorithmConfig, CorrectionConfig
from tests.megatron_rl.batching.test_batch import scored_group

COSTS = CostModel(parity_tokens=1000)
CLIP = LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=0.0, entropy_bonus=0.0)
AGGREGATIONS = get_args(Aggregation)
MAX_RESPONSE_TOKENS = 24
FUNCTIONS = [clipped_surrogate, gspo, cispo]


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


def shares(lengths, *, aggregation, counted=None, num_tokens=None, num_sequences=None):
    """`coefficients`; by default all tokens count, and the lengths are those of the whole mini batch."""
    denominators = Denominators(
        num_tokens=num_tokens or int(lengths.sum()),
        num_sequences=num_sequences or len(lengths),
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    counted = torch.ones(int(lengths.sum()), dtype=torch.bool) if counted is None else counted
    return coefficients(lengths, counted, aggregation=aggregation, denominators=denominators)


def inputs(logprobs, old, advantages, *, lengths=None, weights=None, entropy=None, aggregation="token_mean"):
    lengths = torch.tensor(lengths or [len(old)], dtype=torch.int64)
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros(len(old)) if entropy is None else entropy,
        old_logprobs=tensor(old),
        advantages=tensor(advantages),
        weights=torch.ones(len(old)) if weights is None else tensor(weights),
        coefficients=shares(lengths, aggregation=aggregation),
        lengths=lengths,
        num_tokens=int(lengths.sum()),
    )


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), dual_clip=st.sampled_from([0.0, 1.5, 3.0]))
def test_the_surrogate_equals_a_five_line_reference(seed, dual_clip):
    rng = np.random.default_rng(seed)
    new, old = -rng.exponential(1, 40), -rng.exponential(1, 40)
    advantages, weights = rng.normal(0, 1, 40), rng.uniform(0, 2, 40)
    reference = 0.0
    for n, o, a, w in zip(new, old, advantages, weights, strict=True):
        ratio = math.exp(n - o)
        objective = min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
        reference -= w * (max(objective, dual_clip * a) if dual_clip and a < 0 else objective) / 40
    result = clipped_surrogate(
        inputs(tensor(new), old, advantages, weights=weights),
        LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip, entropy_bonus=0.0),
    )
    assert result.loss.item() == pytest.approx(reference, rel=1e-4, abs=1e-6)
    assert float(result.metrics["actor/pg_loss"]) == result.loss.item()


def test_bounds_bind_separately_and_are_counted():
    # ratio 1.5 with A > 0 is clipped at 1.28; ratio 0.5 with A < 0 at 0.8; the other two keep their gradient.
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    result = clipped_surrogate(inputs(logprobs, [0.0] * 4, [1.0, -1.0, -1.0, 1.0]), CLIP)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.28 - 0.8 - 1.5 + 0.5) / 4)
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 1.5 / 4, -0.5 / 4])
    assert float(result.metrics["actor/pg_clipfrac"]) == 0.5
    assert float(result.metrics["actor/ppo_kl"]) == pytest.approx(-np.log([1.5, 0.5, 1.5, 0.5]).mean())


def test_the_dual_clip_bounds_the_loss_of_one_bad_token():
    logprobs = torch.tensor([10.0]).log().requires_grad_()
    result = clipped_surrogate(
        inputs(logprobs, [0.0], [-1.0]), LossSettings(clip_low=0.2, clip_high=0.2, dual_clip=3.0, entropy_bonus=0.0)
    )
    result.loss.backward()
    assert result.loss.item() == 3.0
    assert logprobs.grad.tolist() == [0.0]
    assert float(result.metrics["actor/pg_clipfrac_lower"]) == 1.0


@pytest.mark.parametrize("loss", FUNCTIONS)
def test_on_policy_the_gradient_is_minus_share_times_weight_times_advantage(loss):
    old, advantages, weights = [-1.0, -2.0, -0.5, -3.0], [1.0, 1.0, -2.0, -2.0], [1.0, 0.5, 0.0, 2.0]
    logprobs = tensor(old).requires_grad_()
    case = inputs(logprobs, old, advantages, lengths=[2, 2], weights=weights, aggregation="sequence_mean")
    loss(case, CLIP).loss.backward()
    expected = -np.array([0.25] * 4) * weights * advantages
    assert logprobs.grad.tolist() == pytest.approx(expected.tolist())


def test_gspo_has_the_gradient_of_the_sequence_ratio():
    old = tensor([-1.0, -2.0, -0.5])
    logprobs = tensor([-0.9, -2.1, -0.55]).requires_grad_()
    wide = LossSettings(clip_low=0.9, clip_high=9.0, dual_clip=0.0, entropy_bonus=0.0)
    case = inputs(logprobs, old.tolist(), [2.0] * 3, aggregation="sequence_mean")
    gspo(case, wide).loss.backward()
    free = logprobs.detach().clone().requires_grad_()
    (-(free - old).mean().exp() * 2.0).backward()
    torch.testing.assert_close(logprobs.grad, free.grad)


def test_cispo_keeps_a_gradient_where_the_surrogate_has_none():
    logprobs = torch.tensor([1.5]).log().requires_grad_()
    cispo(inputs(logprobs, [0.0], [1.0]), CLIP).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.28])


def test_the_entropy_bonus_is_the_token_mean_of_the_entropy():
    entropy = tensor([1.0, 2.0, 6.0]).requires_grad_()
    case = inputs(tensor([-1.0] * 3), [-1.0] * 3, [0.0] * 3, entropy=entropy, lengths=[2, 1])
    result = clipped_surrogate(case, LossSettings(clip_low=0.2, clip_high=0.2, dual_clip=0.0, entropy_bonus=0.1))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-0.3)
    assert float(result.metrics["actor/entropy"]) == pytest.approx(3.0)
    assert entropy.grad.tolist() == pytest.approx([-0.1 / 3] * 3)


@pytest.mark.parametrize("loss", FUNCTIONS)
def test_an_empty_micro_batch_gives_zero_loss_and_zero_gradient(loss):
    parameter = torch.ones(5, requires_grad=True)
    empty = torch.zeros(0)
    case = LossInputs(
        logprobs=parameter[torch.zeros(0, dtype=torch.int64)],
        entropy=empty,
        old_logprobs=empty,
        advantages=empty,
        weights=empty,
        coefficients=empty,
        lengths=torch.zeros(0, dtype=torch.int64),
        num_tokens=7,
    )
    result = loss(case, CLIP)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert parameter.grad.tolist() == [0.0] * 5


def test_the_supervised_loss_is_the_mean_negative_logprob():
    means = shares(torch.tensor([2, 1]), aggregation="token_mean")
    assert float(sft_loss(tensor([-1.0, -2.0, -6.0]), coefficients=means).loss) == pytest.approx(3.0)


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
@given(seed=st.integers(0, 2**32), aggregation=st.sampled_from(AGGREGATIONS))
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
    assert float((packed * tensor(losses[real])).sum()) == pytest.approx(
        naive_aggregation(losses, mask, aggregation), rel=1e-4, abs=1e-6
    )


def test_every_built_in_loss_is_loaded_by_its_short_name():
    assert [load_loss(name) for name in LOSSES.names] == [clipped_surrogate, gspo, cispo]


def test_a_users_loss_is_loaded_by_its_dotted_path():
    assert load_loss("benchmarks.learning.coarse_codes.clipped_surrogate") is clipped_surrogate
    with pytest.raises(ValueError, match=r"algorithm\.loss.*did you mean 'clipped_surrogate'"):
        load_loss("benchmarks.learning.coarse_codes.clipped_surogate")


def test_an_unknown_short_name_of_a_loss_is_refused_naming_the_nearest():
    with pytest.raises(ValueError, match=r"algorithm\.loss = 'cipso': .*did you mean `cispo`"):
        load_loss("cipso")


VOCABULARY, WIDTH = 11, 6


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


def gradient_of(batch, tokens, config, loss):
    """Gradient accumulated over ranks and micro batches by sums alone, as in a trainer."""
    policy = Policy()
    metrics: dict[str, float] = {}
    loss_settings = LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=3.0, entropy_bonus=0.01)
    for mini in batch.mini_batches:
        for micro in (micro for rank in mini.micro_batches for micro in rank):
            rows = [tokens[sample.group_id, sample.sample] for sample in micro.samples]
            lengths = torch.tensor([len(row["targets"]) for row in rows], dtype=torch.int64)

            def column(name, dtype, rows=rows):
                parts = [torch.as_tensor(row[name], dtype=dtype) for row in rows]
                return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)

            logprobs, entropy = policy(column("previous", torch.int64), column("targets", torch.int64))
            old = column("old", torch.float32)
            result = loss(
                LossInputs(
                    logprobs=logprobs,
                    entropy=entropy,
                    old_logprobs=old,
                    advantages=tensor([s.advantage for s in micro.samples]).repeat_interleave(lengths),
                    weights=correction_weights(
                        PackedLogprobs(
                            old_logprobs=old, rollout_logprobs=column("rollout", torch.float32), lengths=lengths
                        ),
                        config=config.correction,
                    ),
                    coefficients=shares(
                        lengths,
                        aggregation=config.aggregation,
                        num_tokens=mini.num_response_tokens,
                        num_sequences=mini.num_sequences,
                    ),
                    lengths=lengths,
                    num_tokens=mini.num_response_tokens,
                ),
                loss_settings,
            )
            result.loss.backward()
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), metrics


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dp_size=st.integers(1, 3),
    max_tokens=st.integers(8, 60),
    aggregation=st.sampled_from(AGGREGATIONS),
    mode=st.sampled_from(["none", "tis_token", "tis_sequence", "mis_geometric"]),
    loss=st.sampled_from(FUNCTIONS),
)
def test_gradient_and_metrics_are_equal_under_any_split(seed, dp_size, max_tokens, aggregation, mode, loss):
    rng = np.random.default_rng(seed)
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
            tokens[group_id, sample] = row
    config = AlgorithmConfig(aggregation=aggregation, correction=CorrectionConfig(mode=mode, cap=1.01, low=1 / 1.01))

    def batch(dp_size, max_tokens):
        return build_batch(
            groups,
            0,
            algorithm=config,
            rules=PackingRules(num_ranks=dp_size, max_tokens=max_tokens, costs=COSTS),
            seed=1,
        )

    whole, whole_metrics = gradient_of(batch(1, 10**6), tokens, config, loss)
    split, split_metrics = gradient_of(batch(dp_size, max_tokens), tokens, config, loss)
    assert batch(dp_size, max_tokens).counts.zero_variance_groups == 1
    assert float((split - whole).norm() / whole.norm()) < 1e-5
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)
