"""Measures quantisation of one rank's publishes: error, saturated codes, and codes changed since the last version.

Only the first 1/128 of the rows of each sent piece is measured, so that publishing does not get slower. The first rows
are consecutive, so they include whole blocks of rows that share a scale.

A version may be published again, because an engine died. Its codes are the same, and no piece of it is measured twice.
So the sums stay those of the first time. One copy of the measured codes is kept, one byte each.
"""

import torch

from megatron_rl.weights.quantization_stats import QuantizationStats, total
from rollout.types import WeightVersion
from rollout.weights.manifest import Box

SAMPLED = 128
"""One row in 128 is measured."""
_LARGEST_E4M3 = 0x7E
"""The code of 448 without its sign bit."""


class CodeWatch:
    """Sums up the measurements of one rank's publishes."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, Box], torch.Tensor] = {}
        """Codes of the newest version in which a piece was measured."""
        self._version = WeightVersion(-1)
        self._measured: set[tuple[str, Box]] = set()
        """Pieces that have been measured in this version."""
        self._sums: dict[int, QuantizationStats] = {}

    def begin(self, version: WeightVersion) -> None:
        """Start a publish: drop the sums of the last one, unless it was of the same version."""
        if version != self._version:
            self._version, self._measured, self._sums = version, set(), {}

    def add(
        self,
        name: str,
        box: Box,
        weight: torch.Tensor,
        codes: torch.Tensor,
        values: torch.Tensor,
        *,
        as_is: bool | None = None,
    ) -> None:
        """Measure the first rows of a piece, once in a version.

        Args:
            name: Hugging Face name of the matrix.
            box: the whole piece.
            weight: the trainer's weights, [rows, K].
            codes: their 8-bit codes, [rows, K].
            values: the decoded codes, [rows, K], float32.
            as_is: for FP8 parameters, whether `codes` are the parameter's own; None for other parameters.
        """
        if (name, box) in self._measured:
            return
        exact, raw = weight.float(), codes.view(torch.uint8)
        gaps = values - exact
        before = self._before.get((name, box))
        layer = layer_of(name)
        measured = QuantizationStats(
            signal=float(torch.dot(exact.reshape(-1), exact.reshape(-1))),
            noise=float(torch.dot(gaps.reshape(-1), gaps.reshape(-1))),
            num_codes=codes.numel(),
            num_saturated=int(_is_largest(codes).sum()),
            num_compared=0 if before is None else codes.numel(),
            num_changed=0 if before is None else int((before != raw).sum()),
            num_as_is=codes.numel() if as_is is True else 0,
            num_requantised=codes.numel() if as_is is False else 0,
        )
        self._sums[layer] = total((self._sums.get(layer, QuantizationStats()), measured))
        self._before[name, box] = raw.clone()
        self._measured.add((name, box))

    def sums(self) -> dict[int, QuantizationStats]:
        """Sums of the current publish, by layer."""
        return dict(self._sums)


def _is_largest(codes: torch.Tensor) -> torch.Tensor:
    """Whether each code has the largest magnitude of its dtype."""
    if codes.dtype.is_floating_point:
        return (codes.view(torch.uint8) & 0x7F) == _LARGEST_E4M3
    return codes.abs() == torch.iinfo(codes.dtype).max


def sampled_rows(box: Box) -> Box:
    """The rows of a piece that are measured: the first 1/128, at least one."""
    return Box(start=box.start, shape=(max(1, box.shape[0] // SAMPLED), *box.shape[1:]))


def layer_of(name: str) -> int:
    """Number of the decoder layer that a tensor belongs to, by its Hugging Face name."""
    return int(name.partition(".layers.")[2].partition(".")[0])
