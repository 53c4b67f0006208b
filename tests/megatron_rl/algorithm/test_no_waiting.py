"""Losses, corrections and metrics of a micro batch never wait for the device.

Tensors are on the `meta` device, which has shapes and no values. What the host would have to read raises there:
a number, a list, a copy to the host, a shape that depends on values.
"""

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from megatron_rl.algorithm.correction import PackedLogprobs, counted_tokens, final_weights, normalization_sums
from megatron_rl.algorithm.loss import Denominators, LossInputs, LossSettings, coefficients, load_loss
from megatron_rl.algorithm.mismatch import MismatchSums, SumsByAge
from megatron_rl.built_in import LOSSES
from megatron_rl.config import Aggregation, CorrectionConfig, RejectionConfig
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


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("name", LOSSES.names)
def test_a_loss_and_its_gradient_do_not_wait(name: str, aggregation: Aggregation) -> None:
    pair, logprobs = packed(), values(requires_grad=True)
    counted = torch.empty(NUM_TOKENS, dtype=torch.bool, device=META)
    counts = Denominators(num_tokens=NUM_TOKENS, num_sequences=NUM_SEQUENCES, max_response_tokens=16)
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=values(),
        old_logprobs=pair.old_logprobs,
        advantages=values(),
        weights=values(),
        coefficients=coefficients(pair.lengths, counted, aggregation=aggregation, denominators=counts),
        lengths=pair.lengths,
        num_tokens=NUM_TOKENS,
    )
    output = load_loss(name)(inputs, LossSettings(clip_low=0.2, clip_high=0.3, dual_clip=3.0, entropy_bonus=0.01))
    output.loss.backward()
    assert logprobs.grad is not None
    assert {value.device for value in output.metrics.values()} == {META}


def test_the_rotation_of_positions_does_not_wait() -> None:
    heads = torch.empty(NUM_TOKENS, 2, 8, device=META, requires_grad=True)
    starts = torch.empty(NUM_SEQUENCES + 1, dtype=torch.int32, device=META)
    rotated = rotate_packed(heads, starts, torch.empty(16, 1, 1, 8, device=META))
    rotated.sum().backward()
    assert rotated.shape == heads.shape
