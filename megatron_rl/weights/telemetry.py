"""Watches the codes of one rank's publishes: how well they stand for the weights, how many have changed.

Looked at is a thirty-second of the rows of each piece that is sent (the first ones: a block of rows keeps its scales),
so that publishing is not slowed down by being watched.
"""

import torch

from megatron_rl.weights.code_sums import CodeSums
from rollout.wire import Box

SAMPLED = 32
"""One of so many rows is looked at."""


class CodeWatch:
    """Gathers the sums of one rank's publishes."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, Box], torch.Tensor] = {}
        self._sums: dict[int, CodeSums] = {}

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
        before = self._before.get((name, box))
        largest = torch.finfo(codes.dtype).max if codes.dtype.is_floating_point else torch.iinfo(codes.dtype).max
        layer = layer_of(name)
        self._sums[layer] = self._sums.get(layer, CodeSums()) + CodeSums(
            signal=float(exact.square().sum()),
            noise=float((values - exact).square().sum()),
            num_codes=codes.numel(),
            num_saturated=int((codes.float().abs() >= largest).sum()),
            num_compared=0 if before is None else codes.numel(),
            num_changed=0 if before is None else int((before != raw).sum()),
            num_as_is=codes.numel() if as_is is True else 0,
            num_requantised=codes.numel() if as_is is False else 0,
        )
        self._before[name, box] = raw.clone()

    def sums(self) -> dict[int, CodeSums]:
        """By layer, of the publish under way."""
        return dict(self._sums)


def sampled_rows(box: Box) -> Box:
    """What is looked at of a piece."""
    return Box(start=box.start, shape=(max(1, box.shape[0] // SAMPLED), *box.shape[1:]))


def layer_of(name: str) -> int:
    """Number of the decoder layer that a tensor belongs to, by its Hugging Face name."""
    return int(name.partition(".layers.")[2].partition(".")[0])
