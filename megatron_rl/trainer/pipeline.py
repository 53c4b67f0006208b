"""Runs Megatron's pipeline schedule over packed micro batches.

One function serves training, old log-probabilities and probes: the caller passes the micro batches and a function of
the scores of each on the last stage. Losses are already divided by their global denominator, so the token count that
the schedule expects is always zero (see `optimizer.finalize`).

`MicroBatchClock` measures forward plus backward of each micro batch. Without a pipeline, a micro batch's backward ends
before the next forward begins, so the time from forward to forward belongs to one micro batch. In a pipeline they
interleave, so nothing is timed. The last micro batch of an optimizer step is left out, because it includes the
reduction of gradients. On CUDA, events are recorded in the stream and read after the step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.model.logprobs import TokenScores
from megatron_rl.model.packed_batch import PackedBatch
from rollout import progress


class MicroBatchClock:
    """Times of the micro batches of one optimizer step."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def begin(self) -> None:
        """Call before each micro batch's forward."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds of every micro batch except the last, in order."""
        if self._events:
            self._events[-1].synchronize()
        milliseconds = [before.elapsed_time(after) for before, after in pairwise(self._events)]
        on_host = [after - before for before, after in pairwise(self._times)]
        return [value / 1000 for value in milliseconds] if self._on_cuda else on_host


Outcome = TypeVar("Outcome")
Output = TypeVar("Output")
"""What the last stage of a model returns: `TokenScores` of a policy, values of a critic."""

OnScores = Callable[[int, TokenScores], tuple[torch.Tensor, Outcome]]
"""(number of the micro batch, its scores) -> (scalar loss, result to return)."""


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[PackedBatch],
    on_scores: Callable[[int, Output], tuple[torch.Tensor, Outcome]],
    *,
    temperature: float | None,
    backward: bool,
    clock: MicroBatchClock | None = None,
) -> list[Outcome]:
    """Forward, and backward if requested, over all micro batches; all ranks of the pipeline call it together.

    Every data-parallel rank must pass the same number of micro batches, at least one. Returns the results of
    `on_scores` in order on the last stage, and an empty list on other stages. `on_scores` takes what the chunks' last
    stage returns: scores of a policy at `temperature`, or values of a critic. `clock` times the micro batches.
    """

    def forward_step(
        numbered: Iterator[tuple[int, PackedBatch]], model: torch.nn.Module
    ) -> tuple[object, Callable[[Output], tuple[torch.Tensor, torch.Tensor, Outcome]]]:
        number, batch = next(numbered)
        named = f"micro batch {number + 1} of {len(micro_batches)}"
        progress.mark(f"{named}, forward")
        if clock is not None:
            clock.begin()

        def loss(scores: Output) -> tuple[torch.Tensor, torch.Tensor, Outcome]:
            value, outcome = on_scores(number, scores)
            progress.mark(f"{named}, {after}")
            return value, torch.zeros([], dtype=torch.int, device=value.device), outcome

        output = model(batch, temperature=temperature)
        if not is_last:  # the last stage is so far after its loss
            progress.mark(f"{named}, {after}")
        return output, loss

    is_last = parallel_state.is_pipeline_last_stage()
    after = "backward" if backward else "after the forward"
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


def forward_logprobs(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[PackedBatch], *, temperature: float
) -> list[torch.Tensor]:
    """Log-probabilities of every micro batch's responses, [R] each, without gradients; last stage only."""

    def keep(number: int, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
        del number
        return scores.logprobs.sum() * 0.0, scores.logprobs.detach()

    return run_schedule(chunks, micro_batches, keep, temperature=temperature, backward=False)
