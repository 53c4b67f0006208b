"""Runs Megatron's pipeline schedule over packed micro batches.

One function serves training, old log-probabilities and probes: the caller gives the micro batches and
says what to do with the scores of each on the last stage. Losses arrive divided by their global
denominator, so the token count that a schedule wants back is always zero (see `optimizer.finalize`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.logprobs import TokenScores
from megatron_rl.micro_batch_clock import MicroBatchClock
from megatron_rl.packed_batch import PackedBatch

Outcome = TypeVar("Outcome")

OnScores = Callable[[int, TokenScores], tuple[torch.Tensor, Outcome]]
"""(number of the micro batch, its scores) -> (scalar loss, what to keep)."""


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[PackedBatch],
    on_scores: OnScores[Outcome],
    *,
    temperature: float,
    backward: bool,
    clock: MicroBatchClock | None = None,
) -> list[Outcome]:
    """Forward, and backward if asked, over all micro batches; entered by every rank of the pipeline at once.

    Every data-parallel rank must bring equally many micro batches, at least one. Returns what `on_scores`
    kept, in order, on the last stage; an empty list elsewhere. `clock` is told when each forward begins.
    """

    def forward_step(
        numbered: Iterator[tuple[int, PackedBatch]], model: torch.nn.Module
    ) -> tuple[object, Callable[[TokenScores], tuple[torch.Tensor, torch.Tensor, Outcome]]]:
        number, batch = next(numbered)
        if clock is not None:
            clock.begin()

        def loss(scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor, Outcome]:
            value, outcome = on_scores(number, scores)
            return value, torch.zeros([], dtype=torch.int, device=value.device), outcome

        return model(batch, temperature=temperature), loss

    iterators = [iter(list(enumerate(micro_batches))) for _ in chunks]
    with torch.set_grad_enabled(backward):
        outcomes: list[Outcome] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(micro_batches),
            seq_length=max(len(batch.tokens) for batch in micro_batches),
            micro_batch_size=1,
            forward_only=not backward,
        )
    return outcomes
