"""Batches of supervised fine-tuning (SFT): rows by step, rank and micro batch.

Pure. Every epoch shuffles the rows anew, by the seed and the epoch number. A step takes the next `batch_size` rows of
that endless order. The loss is the mean over the response tokens of the whole step, whose denominator is `num_tokens`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.batching.balance import PackingRules, balance


@dataclass(frozen=True, slots=True, kw_only=True)
class SftBatch:
    """One optimizer step of SFT, as row numbers."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[data-parallel rank][micro batch][row]. Micro batches may be empty; all ranks have equally many."""
    num_tokens: int
    """Response tokens of the step over all ranks."""


def sft_batches(
    lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    batch_size: int,
    num_steps: int,
    rules: PackingRules,
    seed: int,
) -> Iterator[SftBatch]:
    """The steps of SFT; `lengths` are prompt plus response tokens of each row."""
    order = _endless_order(len(lengths), seed)
    for _ in range(num_steps):
        rows = [next(order) for _ in range(batch_size)]
        row_lengths = [lengths[row] for row in rows]
        placed = balance(row_lengths, num_ranks=rules.num_ranks, max_tokens=rules.max_tokens, costs=rules.costs)
        yield SftBatch(
            micro_batches=tuple(tuple(tuple(rows[i] for i in micro) for micro in rank) for rank in placed),
            num_tokens=sum(response_lengths[row] for row in rows),
        )


def _endless_order(num_rows: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        yield from np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows).tolist()
        epoch += 1
