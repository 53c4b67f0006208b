"""Sums and means over the sequences of packed tokens.

T: tokens, sequence after sequence without padding; B: sequences. None of these waits for the device.
"""

import torch
from torch import Tensor


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each sequence: [T] and [B] to [B]."""
    return segment(values, lengths, "sum")


def sequence_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean over each sequence: [T] and [B] to [B]."""
    return segment(values, lengths, "mean")


def spread(of_sequences: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """A value of each sequence, [B], for each of its tokens, [T]; without the number of tokens a GPU would be asked."""
    return of_sequences.repeat_interleave(lengths, output_size=num_tokens)


def segment(values: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    """A reduction (`sum`, `mean`, `min`, `max`) over each sequence: [T] and [B] to [B]."""
    if lengths.numel() == 0:
        return values[:0]  # with its path to the parameters
    return torch.segment_reduce(values, reduction, lengths=lengths, unsafe=True)  # its checks read lengths on the host
