"""Response tokens that the policy has not sampled count nowhere: the results are those of a batch without them."""

from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.aggregation import Denominators, MeanInputs
from megatron_rl.algorithm.columns import Columns, LossInputs
from megatron_rl.algorithm.correction import correction_weights, normalization_sums
from megatron_rl.algorithm.mismatch import MismatchSums, SumsByAge
from megatron_rl.algorithm.objective import Terms, objective
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm.sequences import sequence_sum
from megatron_rl.algorithm.token_advantages import TokenOutcome
from megatron_rl.algorithm.value_loss import ValueInputs, value_loss
from megatron_rl.algorithm_config import AlgorithmConfig, KlEstimator
from megatron_rl.algorithm_settings import ADVANTAGES, AGGREGATIONS, LOSSES
from megatron_rl.correction_config import CorrectionConfig, RejectionConfig
from megatron_rl.model.packed_batch import pack_batch
from megatron_rl.trainer.critic import ValueTargets, _moments
from megatron_rl.trainer.loaded_batch import LoadedMicroBatch, SampledTokens
from megatron_rl.trainer.preparation import prepare, rewards_of_tokens

MODES = get_args(CorrectionConfig.model_fields["mode"].annotation)
STATISTICS = get_args(RejectionConfig.model_fields["statistic"].annotation)
COLUMNS = ("logprobs", "entropy", "old", "rollout", "advantages", "ref", "values", "returns")
FAR = 1e4
"""What a column holds where the policy has not sampled: no result may come near it."""


@dataclass(frozen=True)
class Tokens:
    """Columns of the tokens of some sequences."""

    columns: dict[str, torch.Tensor]
    mask: torch.Tensor
    lengths: list[int]
    of_sequences: dict[str, torch.Tensor]

    @classmethod
    def random(cls, seed: int, lengths: list[int], masked: float) -> "Tokens":
        generator = torch.Generator().manual_seed(seed)
        count = sum(lengths)
        columns = {name: torch.randn(count, generator=generator) for name in COLUMNS}
        for name, spread in (("old", 0.3), ("rollout", 0.4), ("ref", 0.2)):
            columns[name] = columns["logprobs"] + spread * columns[name]
        mask = torch.rand(count, generator=generator) >= masked
        mask[-1] = True
        for values in columns.values():
            values[~mask] = FAR * torch.randn(int((~mask).sum()), generator=generator)
        staleness = torch.randint(0, 3, (len(lengths),), generator=generator)
        rewards = torch.randn(len(lengths), generator=generator)
        return cls(columns, mask, lengths, {"staleness": staleness, "rewards": rewards})

    def sampled(self) -> "Tokens":
        """Without tokens that were not sampled, and without sequences that have no others."""
        counts = [int(part.sum()) for part in self.mask.split(self.lengths)]
        kept = torch.tensor([count > 0 for count in counts])
        return Tokens(
            {name: values[self.mask] for name, values in self.columns.items()},
            self.mask[self.mask],
            [count for count in counts if count],
            {name: values[kept] for name, values in self.of_sequences.items()},
        )

    @property
    def micro(self) -> LoadedMicroBatch:
        ids = [0] * max(self.lengths)
        return LoadedMicroBatch(
            packed=pack_batch([(ids[:1], ids[:length]) for length in self.lengths], multiple_of=1),
            rollout_logprobs=self.columns["rollout"],
            advantages=self.columns["advantages"],
            loss_mask=self.mask,
            sampled=SampledTokens.of(self.mask, self.lengths),
            lengths=torch.tensor(self.lengths),
            **self.of_sequences,
        )


def some_tokens():
    lengths = st.lists(st.integers(1, 7), min_size=1, max_size=5)
    return st.builds(Tokens.random, st.integers(0, 2**32), lengths, st.sampled_from([0.2, 0.5, 0.8]))


def algorithms():
    rules = st.lists(st.sampled_from(STATISTICS), max_size=2, unique=True)
    corrections = st.builds(
        lambda mode, statistics, normalize, veto, in_denominators: CorrectionConfig(
            mode=mode,
            rejections=tuple(RejectionConfig(statistic=statistic, high=1.3) for statistic in statistics),
            batch_normalize=normalize,
            veto_ratio=veto,
            rejected_in_denominators=in_denominators,
            cap=1.4,
        ),
        st.sampled_from(MODES), rules, st.booleans(), st.sampled_from([0.0, 0.6]), st.booleans(),
    )  # fmt: skip
    return st.builds(
        lambda correction, estimator: AlgorithmConfig(
            correction=correction, kl={"place": "loss", "estimator": estimator}, entropy={"coefficient": 0.1}
        ),
        corrections, st.sampled_from(get_args(KlEstimator)),
    )  # fmt: skip


def results(tokens: Tokens, algorithm: AlgorithmConfig, loss: str, aggregation: str):
    """Loss and metrics, gradients of tokens, metrics of the mismatch, as the learner computes them."""
    micro, columns, config = tokens.micro, tokens.columns, algorithm.correction
    further, pair = Columns(tensors={"ref": columns["ref"]}), micro.against(columns["old"])
    sums = normalization_sums(correction_weights(pair, config=config), pair.lengths, config=config)
    known = prepare(micro, columns["old"], further, algorithm=algorithm, sums=sums)
    counted = known.counted if config.counts_kept_tokens else tokens.mask
    denominators = Denominators(
        num_tokens=int(counted.sum()),
        num_sequences=int((sequence_sum(counted.float(), micro.lengths) > 0).sum()),
        max_response_tokens=7,
    )
    chosen = AlgorithmConfig(loss=loss, aggregation=aggregation)
    shares = load_stage(AGGREGATIONS, chosen.aggregation).function
    leaves = [columns[name].clone().requires_grad_() for name in ("logprobs", "entropy")]
    inputs = LossInputs(
        logprobs=leaves[0],
        entropy=leaves[1],
        old_logprobs=known.old_logprobs,
        rollout_logprobs=micro.rollout_logprobs,
        advantages=known.advantages,
        coefficients=shares(MeanInputs(lengths=micro.lengths, counted=known.counted, denominators=denominators)),
        loss_mask=micro.loss_mask,
        staleness=micro.staleness,
        lengths=micro.lengths,
        num_tokens=int(tokens.mask.sum()),
        further=further,
    )
    terms = Terms(kl_estimator=algorithm.kl.estimator, kl_coefficient=0.2, entropy_coefficient=0.1)
    output = objective(load_stage(LOSSES, chosen.loss).function, inputs, weights=known.weights, terms=terms)
    gradients = torch.autograd.grad(output.loss, leaves)
    by_age = SumsByAge.empty(2)
    sampled = micro.sampled
    by_age.add(pair, sampled.select(known.weights), micro.staleness.index_select(0, sampled.sequences))
    mismatch = MismatchSums.of(pair, config=config).finalize() | by_age.metrics()
    metrics = {name: float(value) for name, value in output.metrics.items()}
    return {"loss": float(output.loss), **metrics, **mismatch}, torch.stack(gradients)


@pytest.mark.parametrize("loss", LOSSES.by_name)
@pytest.mark.parametrize("aggregation", AGGREGATIONS.by_name)
@settings(max_examples=6)
@given(tokens=some_tokens(), algorithm=algorithms())
def test_loss_gradient_correction_and_metrics_are_those_without_the_masked_tokens(loss, aggregation, tokens, algorithm):
    found, gradients = results(tokens, algorithm, loss, aggregation)
    expected, of_sampled = results(tokens.sampled(), algorithm, loss, aggregation)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert bool((gradients[:, ~tokens.mask] == 0).all())
    torch.testing.assert_close(gradients[:, tokens.mask], of_sampled, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("advantage", ["discounted_returns", "gae"])
@settings(max_examples=30)
@given(tokens=some_tokens())
def test_advantages_of_tokens_hand_the_reward_over_masked_tokens(advantage, tokens):
    config = AlgorithmConfig(advantage={"name": advantage, "gamma": 0.9})
    function = load_stage(ADVANTAGES, config.advantage).function

    def advantages(of: Tokens):
        outcome = TokenOutcome(
            rewards=rewards_of_tokens(of.micro),
            old_logprobs=of.columns["old"],
            rollout_logprobs=of.columns["rollout"],
            loss_mask=of.mask,
            lengths=of.micro.lengths,
            further=Columns(tensors={"values": of.columns["values"]}),
        )
        return function(outcome)

    found, expected = advantages(tokens), advantages(tokens.sampled())
    torch.testing.assert_close(found.advantages[tokens.mask], expected.advantages, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.returns[tokens.mask], expected.returns, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(tokens=some_tokens(), clip=st.sampled_from([0.0, 0.2]))
def test_a_critic_learns_from_sampled_tokens_only_and_its_metrics_say_so(tokens, clip):
    def learned(of: Tokens):
        values, shares = of.columns["values"].clone().requires_grad_(), of.mask.float() / of.mask.sum()
        old, returns = of.columns["ref"], of.columns["returns"]
        inputs = ValueInputs(
            values=values, old_values=old, returns=returns, coefficients=shares, num_tokens=int(of.mask.sum())
        )
        loss, metrics = value_loss(inputs, clip=clip)
        moments = _moments([ValueTargets(old_values=old, returns=returns, shares=shares)])
        (gradient,) = torch.autograd.grad(loss, values)
        return [*map(float, metrics.values()), *moments.tolist()], gradient

    (found, gradient), (expected, of_sampled) = learned(tokens), learned(tokens.sampled())
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert bool((gradient[~tokens.mask] == 0).all())
    torch.testing.assert_close(gradient[tokens.mask], of_sampled)
