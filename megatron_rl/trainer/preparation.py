"""What is known of a step's tokens before its first update: columns of further models, correction, advantages.

Scores exist on the last pipeline stage only, and so do prepared micro batches. Sums over the whole step (batch
normalisation, denominators of kept tokens, whitening) are reduced over data-parallel ranks here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.algorithm.aggregation import Denominators
from megatron_rl.algorithm.columns import Columns
from megatron_rl.algorithm.correction import (
    PackedLogprobs,
    correction_weights,
    counted_tokens,
    final_weights,
    normalization_sums,
)
from megatron_rl.algorithm.kl import reward_term
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm.sequences import sequence_sum
from megatron_rl.algorithm.token_advantages import (
    TokenAdvantages,
    TokenOutcome,
    terminal_rewards,
    whitened,
    whitening_sums,
)
from megatron_rl.algorithm_settings import ADVANTAGES
from megatron_rl.config import AlgorithmConfig
from megatron_rl.stages import Column
from megatron_rl.trainer.further_models import FurtherModels
from megatron_rl.trainer.loaded_batch import LoadedMicroBatch, LoadedMiniBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Of one micro batch, [R] each; empty for a dummy."""

    old_logprobs: torch.Tensor
    weights: torch.Tensor
    """Of the correction."""
    counted: torch.Tensor
    """Whether the loss's denominators count a token."""
    advantages: torch.Tensor
    returns: torch.Tensor
    """What a critic learns to predict; equal to `advantages` where the controller computed those."""
    further: Columns


def token_advantage(algorithm: AlgorithmConfig) -> Callable[[TokenOutcome], TokenAdvantages] | None:
    """The advantage of tokens; None if the controller computes advantages."""
    loaded = load_stage(ADVANTAGES, algorithm.advantage)
    if loaded.inputs is not TokenOutcome:
        return None
    return cast(Callable[[TokenOutcome], TokenAdvantages], loaded.function)


def further_columns(
    mini_batches: Sequence[LoadedMiniBatch], models: FurtherModels, needed: frozenset[Column]
) -> list[list[Columns]]:
    """Columns of every micro batch by mini batch; a collective. Empty columns before the last stage.

    All mini batches are scored together: a reference in host memory is exchanged once, and a pipeline is filled once.
    Without mini batches, which is so on all ranks alike, nothing is scored.
    """
    if not mini_batches:
        return []
    together = _columns([micro for mini in mini_batches for micro in mini.micro_batches], models, needed)
    columns = iter(together)
    return [[next(columns) for _ in mini.micro_batches] for mini in mini_batches]


def _columns(
    micro_batches: Sequence[LoadedMicroBatch], models: FurtherModels, needed: frozenset[Column]
) -> list[Columns]:
    scores: dict[Column, list[torch.Tensor]] = {}
    if "ref" in needed and models.reference is not None:
        scores["ref"] = models.reference.logprobs(micro_batches)
    if "values" in needed and models.critic is not None:
        scores["values"] = models.critic.values(micro_batches)
    if not all(scores.values()):  # before the last stage
        return [Columns() for _ in micro_batches]
    return [
        Columns(tensors={name: micro.real(of_micro[number]).detach() for name, of_micro in scores.items()})
        for number, micro in enumerate(micro_batches)
    ]


def prepare(
    micro: LoadedMicroBatch,
    old_logprobs: torch.Tensor,
    further: Columns,
    *,
    algorithm: AlgorithmConfig,
    sums: torch.Tensor | None = None,
) -> Prepared:
    """One micro batch with the advantages of the controller; `sums` are those of batch normalisation.

    A token that the policy has not sampled has the weight 0 and does not count.
    """
    config, pair, num_tokens = algorithm.correction, micro.against(old_logprobs), len(micro.loss_mask)
    return Prepared(
        old_logprobs=old_logprobs,
        weights=micro.sampled.place(final_weights(pair, config=config, sums=sums), num_tokens),
        counted=micro.sampled.place(counted_tokens(pair, config=config), num_tokens),
        advantages=micro.advantages,
        returns=micro.advantages,
        further=further,
    )


def normalization(
    pairs: Sequence[PackedLogprobs], *, algorithm: AlgorithmConfig, device: torch.device
) -> torch.Tensor | None:
    """Sum and count of the step's weights over data-parallel ranks; None without batch normalisation."""
    config = algorithm.correction
    if not config.batch_normalize:
        return None
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for pair in pairs:
        sums += normalization_sums(correction_weights(pair, config=config), pair.lengths, config=config)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums


def kept_denominators(
    mini_batches: Sequence[LoadedMiniBatch],
    prepared: Sequence[Sequence[Prepared]],
    *,
    max_response_tokens: int,
    device: torch.device,
) -> list[Denominators]:
    """What each mini batch counts over data-parallel ranks."""
    counts = torch.zeros(len(prepared), 2, dtype=torch.int64, device=device)
    for row, (mini, of_mini) in enumerate(zip(mini_batches, prepared, strict=True)):
        for micro, each in zip(mini.micro_batches, of_mini, strict=True):
            in_sequence = sequence_sum(each.counted.float(), micro.lengths)
            counts[row] += torch.stack([each.counted.sum(), (in_sequence > 0).sum()])
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    return [
        Denominators(num_tokens=tokens, num_sequences=sequences, max_response_tokens=max_response_tokens)
        for tokens, sequences in counts.tolist()
    ]


def with_token_advantages(
    micro_batches: Sequence[LoadedMicroBatch],
    prepared: Sequence[Prepared],
    function: Callable[[TokenOutcome], TokenAdvantages],
    *,
    algorithm: AlgorithmConfig,
    kl_coefficient: float,
) -> tuple[list[Prepared], dict[str, torch.Tensor]]:
    """All micro batches of the step with advantages of tokens, and this rank's sums for the step's metrics."""
    results: list[TokenAdvantages] = []
    sums: dict[str, torch.Tensor] = {}
    for micro, each in zip(micro_batches, prepared, strict=True):
        rewards = rewards_of_tokens(micro)
        if algorithm.kl.place == "reward":
            tokens, bounded = reward_term(each.old_logprobs, each.further["ref"], estimator=algorithm.kl.estimator)
            tokens = torch.where(micro.loss_mask, tokens, 0.0)
            rewards = rewards - kl_coefficient * tokens
            counted = {
                "kl": tokens.double().sum(),
                "tokens": micro.loss_mask.double().sum(),
                "actor/reward_kl_bounded": (bounded & micro.loss_mask).double().sum(),
            }
            sums = {name: sums[name] + value if name in sums else value for name, value in counted.items()}
        outcome = TokenOutcome(
            rewards=rewards,
            old_logprobs=each.old_logprobs,
            rollout_logprobs=micro.rollout_logprobs,
            loss_mask=micro.loss_mask,
            lengths=micro.lengths,
            further=each.further,
        )
        results.append(function(outcome))
    advantages = _whitened(micro_batches, results)
    done = [
        replace(each, advantages=values.detach(), returns=result.returns.detach())
        for each, values, result in zip(prepared, advantages, results, strict=True)
    ]
    return done, sums


def rewards_of_tokens(micro: LoadedMicroBatch) -> torch.Tensor:
    """The reward of each response at its last sampled token, [R]; 0 elsewhere."""
    sampled = micro.sampled
    rewards = micro.rewards.index_select(0, sampled.sequences)
    of_sampled = terminal_rewards(rewards, sampled.lengths, len(sampled.positions))
    return sampled.place(of_sampled, len(micro.loss_mask))


def _whitened(micro_batches: Sequence[LoadedMicroBatch], results: Sequence[TokenAdvantages]) -> list[torch.Tensor]:
    """Advantages of the step, standardised over data-parallel ranks if the function asks for it."""
    for micro, result in zip(micro_batches, results, strict=True):
        if result.advantages.shape != micro.loss_mask.shape or result.returns.shape != micro.loss_mask.shape:
            raise ValueError(
                f"{ADVANTAGES.key} returned shapes {tuple(result.advantages.shape)} and {tuple(result.returns.shape)} "
                f"for {len(micro.loss_mask)} tokens; it must return one number for each token"
            )
    if not any(result.whiten for result in results):
        return [result.advantages for result in results]
    sums = torch.stack(
        [
            whitening_sums(result.advantages, micro.loss_mask)
            for micro, result in zip(micro_batches, results, strict=True)
        ]
    ).sum(0)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return [whitened(result.advantages, sums) for result in results]
