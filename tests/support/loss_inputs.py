"""Tokens of one micro batch for losses, from plain lists."""

import torch

from megatron_rl.algorithm.aggregation import Denominators, MeanInputs
from megatron_rl.algorithm.columns import Columns, LossInputs
from megatron_rl.algorithm.objective import LossOutput, Terms, objective
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm_config import AlgorithmConfig
from megatron_rl.algorithm_settings import AGGREGATIONS, LOSSES

MAX_RESPONSE_TOKENS = 24


def column(values):
    """A column as given, or of a list in float32."""
    return values if isinstance(values, torch.Tensor) else torch.tensor(list(values), dtype=torch.float32)


def choice(**stage):
    """The settings of one stage of the algorithm."""
    ((key, value),) = stage.items()
    return getattr(AlgorithmConfig(**{key: value}), key)


def shares(lengths, *, aggregation, counted=None, num_tokens=None, num_sequences=None):
    """Shares of the mean; by default all tokens count, and the lengths are those of the whole mini batch."""
    denominators = Denominators(
        num_tokens=num_tokens or int(lengths.sum()),
        num_sequences=num_sequences or len(lengths),
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    counted = torch.ones(int(lengths.sum()), dtype=torch.bool) if counted is None else counted
    function = load_stage(AGGREGATIONS, choice(aggregation=aggregation)).function
    return function(MeanInputs(lengths=lengths, counted=counted, denominators=denominators))


def loss_inputs(
    logprobs, old, advantages, *, lengths=None, rollout=None, entropy=None, aggregation="token_mean", **further
):
    """The inputs of a loss; without lengths, of one sequence."""
    old, logprobs = column(old), column(logprobs)
    lengths = torch.tensor([len(old)] if lengths is None else lengths, dtype=torch.int64)
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros_like(old) if entropy is None else entropy,
        old_logprobs=old,
        rollout_logprobs=old if rollout is None else column(rollout),
        advantages=column(advantages),
        coefficients=shares(lengths, aggregation=aggregation).to(old.dtype),
        loss_mask=torch.ones(len(old), dtype=torch.bool),
        staleness=torch.zeros_like(lengths),
        lengths=lengths,
        num_tokens=int(lengths.sum()),
        further=Columns(tensors={name: column(values) for name, values in further.items()}),
    )


def run_loss(loss, inputs, *, weights=None, terms=None) -> LossOutput:
    """The objective of one micro batch under a loss by name or table."""
    weights = torch.ones_like(inputs.old_logprobs) if weights is None else column(weights)
    function = load_stage(LOSSES, choice(loss=loss)).function
    return objective(function, inputs, weights=weights, terms=terms or Terms())
