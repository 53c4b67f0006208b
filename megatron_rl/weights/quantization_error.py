"""Watches the codes of one rank's publishes: how well they stand for the weights, how many have changed.

Looked at is one in 128 rows of each piece that is sent (the first ones: a block of rows keeps its scales), so that
publishing is not slowed down by being watched.
"""

import torch

from megatron_rl.weights.quantization_stats import QuantizationStats
from rollout.weights.manifest import Box

SAMPLED = 128
"""One of so many rows is looked at."""
_LARGEST_E4M3 = 0x7E
"""The code of 448, without its sign."""


class CodeWatch:
    """Gathers the sums of one rank's publishes."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, Box], torch.Tensor] = {}
        self._sums: dict[int, QuantizationStats] = {}

    def begin(self) -> None:
        """A new publish."""
        self._sums = {}

    def see(
        self,
        name: str,
        box: Box,
        weight: torch.Tensor,
        codes: torch.Tensor,
        values: torch.Tensor,
        *,
        as_is: bool | None = None,
    ) -> None:
        """Look at the first rows of a piece: weights, codes and what they stand for, [rows, K] each.

        `as_is` says of weights that are FP8 in the trainer whether these are their own codes.
        """
        exact, raw = weight.float(), codes.view(torch.uint8)
        gaps = values - exact
        before = self._before.get((name, box))
        layer = layer_of(name)
        self._sums[layer] = self._sums.get(layer, QuantizationStats()) + QuantizationStats(
            signal=float(torch.dot(exact.reshape(-1), exact.reshape(-1))),
            noise=float(torch.dot(gaps.reshape(-1), gaps.reshape(-1))),
            num_codes=codes.numel(),
            num_saturated=int(_is_largest(codes).sum()),
            num_compared=0 if before is None else codes.numel(),
            num_changed=0 if before is None else int((before != raw).sum()),
            num_as_is=codes.numel() if as_is is True else 0,
            num_requantised=codes.numel() if as_is is False else 0,
        )
        self._before[name, box] = raw.clone()

    def sums(self) -> dict[int, QuantizationStats]:
        """By layer, of the publish under way."""
        return dict(self._sums)


def _is_largest(codes: torch.Tensor) -> torch.Tensor:
    """Whether codes have the largest magnitude that there is."""
    if codes.dtype.is_floating_point:
        return (codes.view(torch.uint8) & 0x7F) == _LARGEST_E4M3
    return codes.abs() == torch.iinfo(codes.dtype).max


def sampled_rows(box: Box) -> Box:
    """What is looked at of a piece."""
    return Box(start=box.start, shape=(max(1, box.shape[0] // SAMPLED), *box.shape[1:]))


def layer_of(name: str) -> int:
    """Number of the decoder layer that a tensor belongs to, by its Hugging Face name."""
    return int(name.partition(".layers.")[2].partition(".")[0])
