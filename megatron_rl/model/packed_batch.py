"""Packs the samples of one micro batch into a single row of tokens.

Sequences are not padded: `cu_seqlens` holds their starts, attention stays within a sequence, and positions restart at
0. The row is padded at its end to a multiple of the tensor-parallel size, because sequence parallelism splits it into
equal parts. The padding is a segment of its own, which no sequence attends to and no score uses.

The shift by one is done here only: row t - 1 predicts the token at row t, so the log-probabilities of a response lie at
the rows from its last prompt token to its last token but one. `score_rows` and `targets` list them in the order of
response tokens, so a score vector [R] matches the sampler's concatenated log-probabilities without a mask.

Shape legend: B sequences, T rows of the packed batch (padding included), R response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_rl.model.copies import on_device
from rollout.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One micro batch; equal on all pipeline stages."""

    tokens: torch.Tensor
    """[T] int64"""
    position_ids: torch.Tensor
    """[T] int64, from 0 in every segment."""
    cu_seqlens: torch.Tensor
    """[B + 1] int32, or [B + 2] with the padding tail; starts of the segments and T."""
    max_seqlen: int
    """Tokens of the longest segment."""
    score_rows: torch.Tensor
    """[R] int64; row whose output predicts each response token."""
    targets: torch.Tensor
    """[R] int64; the response tokens, sequence after sequence."""
    response_starts: tuple[int, ...]
    """[B + 1]; scores of sequence i are `[response_starts[i]:response_starts[i + 1]]` of [R]."""

    @property
    def num_sequences(self) -> int:
        """B, without the padding."""
        return len(self.response_starts) - 1

    def to(self, device: torch.device) -> "PackedBatch":
        """The batch, which is on the host, with its tensors on `device`; the host does not wait."""
        return replace(
            self,
            tokens=on_device(self.tokens, device),
            position_ids=on_device(self.position_ids, device),
            cu_seqlens=on_device(self.cu_seqlens, device),
            score_rows=on_device(self.score_rows, device),
            targets=on_device(self.targets, device),
        )


def pack_batch(samples: Sequence[tuple[TokenIds, TokenIds]], *, multiple_of: int = 1) -> PackedBatch:
    """Pack (prompt, response) pairs, padded at the end to `multiple_of` rows.

    Raises:
        ValueError: no sample, or one without a prompt token or a response token.
    """
    if not samples:
        raise ValueError("a micro batch holds 0 samples; needs at least 1")
    for index, (prompt, response) in enumerate(samples):
        if not len(prompt) or not len(response):
            raise ValueError(
                f"sample {index} has {len(prompt)} prompt and {len(response)} response tokens; needs at least 1 of both"
            )
    lengths = [len(prompt) + len(response) for prompt, response in samples]
    tail = -sum(lengths) % multiple_of
    segments = [*lengths, tail] if tail else lengths
    starts = np.concatenate([[0], np.cumsum(segments)])
    tokens = [ids for sample in samples for ids in sample]
    return PackedBatch(
        tokens=_int64([*tokens, np.zeros(tail)]),
        position_ids=_int64([np.arange(length) for length in segments]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=max(segments),
        score_rows=_int64(
            [
                np.arange(start + len(prompt) - 1, start + len(prompt) + len(response) - 1)
                for start, (prompt, response) in zip(starts, samples, strict=False)
            ]
        ),
        targets=_int64([response for _, response in samples]),
        response_starts=(0, *np.cumsum([len(response) for _, response in samples]).tolist()),
    )


def _int64(parts: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
