"""Losses, corrections and metrics of a micro batch never wait for the device.

Tensors are on the `meta` device, which has shapes and no values. What the host would have to read raises there:
a number, a list, a copy to the host, a shape that depends on values.
"""

from collections.abc import Callable
from typing import cast, get_args

import pytest
import torch

from megatron_rl.algorithm.aggregation import Denominators, MeanInputs
from megatron_rl.algorithm.columns import Columns, LossInputs
from megatron_rl.algorithm.correction import PackedLogprobs, counted_tokens, final_weights, normalization_sums
from megatron_rl.algorithm.mismatch import MismatchSums, SumsByAge
from megatron_rl.algorithm.objective import BoundLoss, Terms, objective
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm.token_advantages import (
    TokenAdvantages,
    TokenOutcome,
    terminal_rewards,
    whitened,
    whitening_sums,
)
from megatron_rl.algorithm_settings import ADVANTAGES, AGGREGATIONS, LOSSES
from megatron_rl.config import AlgorithmConfig, CorrectionConfig, RejectionConfig
from megatron_rl.model.rotary import rotate_packed

META = torch.device("meta")
NUM_TOKENS, NUM_SEQUENCES = 40, 5
STATISTICS = get_args(RejectionConfig.model_fields["statistic"].annotation)


def values(*, requires_grad: bool = False) -> torch.Tensor:
    return torch.empty(NUM_TOKENS, device=META, requires_grad=requires_grad)


def packed() -> PackedLogprobs:
    lengths = torch.empty(NUM_SEQUENCES, dtype=torch.int64, device=META)
    return PackedLogprobs(old_logprobs=values(), rollout_logprobs=values(), lengths=lengths)


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: float(tensor[0]),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: bool((tensor > 0).all()),
        lambda tensor: tensor.repeat_interleave(tensor.long()),
    ],
    ids=["number", "list", "copy", "selection", "condition", "repetition"],
)
def test_what_waits_raises(wait: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        wait(values())


@pytest.mark.parametrize("mode", get_args(CorrectionConfig.model_fields["mode"].annotation))
def test_a_correction_and_its_metrics_do_not_wait(mode: str) -> None:
    rules = tuple(RejectionConfig(statistic=statistic, high=2.0) for statistic in STATISTICS)
    update = {"mode": mode, "batch_normalize": True, "veto_ratio": 1e-4, "rejections": rules}
    config = CorrectionConfig().model_copy(update=update)
    pair = packed()
    total = MismatchSums.empty(config=config, device=META).merge(MismatchSums.of(pair, config=config))
    weights = final_weights(pair, config=config, sums=normalization_sums(values(), pair.lengths, config=config))
    ages = SumsByAge.empty(2, META)
    ages.add(pair, weights, pair.lengths)
    assert {vector.device for vector in (*total.vectors(), ages.sums)} == {META}
    assert counted_tokens(pair, config=config).device == META


def loss_inputs(aggregation: str) -> LossInputs:
    pair, algorithm = packed(), AlgorithmConfig(aggregation=aggregation)  # type: ignore[arg-type]
    counts = Denominators(num_tokens=NUM_TOKENS, num_sequences=NUM_SEQUENCES, max_response_tokens=16)
    counted = torch.empty(NUM_TOKENS, dtype=torch.bool, device=META)
    shares = load_stage(AGGREGATIONS, algorithm.aggregation).function(
        MeanInputs(lengths=pair.lengths, counted=counted, denominators=counts)
    )
    return LossInputs(
        logprobs=values(requires_grad=True),
        entropy=values(),
        old_logprobs=pair.old_logprobs,
        rollout_logprobs=pair.rollout_logprobs,
        advantages=values(),
        coefficients=shares,  # type: ignore[arg-type]
        loss_mask=counted,
        staleness=pair.lengths,
        lengths=pair.lengths,
        num_tokens=NUM_TOKENS,
        further=Columns(tensors={"ref": values(), "values": values()}),
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS.by_name)
@pytest.mark.parametrize("name", LOSSES.by_name)
def test_a_loss_and_its_gradient_do_not_wait(name: str, aggregation: str) -> None:
    inputs, algorithm = loss_inputs(aggregation), AlgorithmConfig(loss=name)  # type: ignore[arg-type]
    loss = cast(BoundLoss, load_stage(LOSSES, algorithm.loss).function)
    terms = Terms(kl_estimator="k3_unbiased", kl_coefficient=0.1, entropy_coefficient=0.01)
    output = objective(loss, inputs, weights=values(), terms=terms)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    assert {value.device for value in output.metrics.values()} == {META}


@pytest.mark.parametrize("name", ["discounted_returns", "gae"])
def test_an_advantage_of_tokens_does_not_wait(name: str) -> None:
    inputs, algorithm = loss_inputs("token_mean"), AlgorithmConfig(advantage=name)  # type: ignore[arg-type]
    outcome = TokenOutcome(
        rewards=terminal_rewards(torch.empty(NUM_SEQUENCES, device=META), inputs.lengths, NUM_TOKENS),
        old_logprobs=inputs.old_logprobs,
        rollout_logprobs=inputs.rollout_logprobs,
        loss_mask=inputs.loss_mask,
        lengths=inputs.lengths,
        further=inputs.further,
    )
    result = cast(TokenAdvantages, load_stage(ADVANTAGES, algorithm.advantage).function(outcome))
    assert whitened(result.advantages, whitening_sums(result.advantages, inputs.loss_mask)).device == META


def test_the_rotation_of_positions_does_not_wait() -> None:
    heads = torch.empty(NUM_TOKENS, 2, 8, device=META, requires_grad=True)
    starts = torch.empty(NUM_SEQUENCES + 1, dtype=torch.int32, device=META)
    rotated = rotate_packed(heads, starts, torch.empty(16, 1, 1, 8, device=META))
    rotated.sum().backward()
    assert rotated.shape == heads.shape
