"""Backends of quantisation: torch, numba kernels on CPUs, Transformer Engine's kernel on CUDA devices.

A `CodeFormat` defines scales; a `Backend` computes largest magnitudes, encodes weights and decodes codes. A packer
chooses its backend once (`choose_backend`), by the format and by the device and dtype of its weights.

Invariant: all backends give the same bytes (a property test compares them with a naive reference).

Shape legend: N output channels, K inputs; P x Q blocks that a box touches (rows: N x 1). `start` is the first row
and column of a box in the whole tensor, whose blocks it shares; None if each row has its own scale.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from megatron_rl.cpu import code_loops
from megatron_rl.quantization import te_kernel
from megatron_rl.quantization.formats import (
    CodeFormat,
    Start,
    channel_values,
    int8_codes,
    row_amax,
)
from megatron_rl.quantization.fp8 import (
    block_amax,
    copied_into,
    fp8_block_codes,
    fp8_block_values,
    fp8_channel_codes,
)


class Backend(Protocol):
    """Encodes and decodes 8-bit codes."""

    def supports(self, format: CodeFormat, device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
        """Whether this backend can quantise weights of these dtypes, all on one device."""

    def amax(self, weight_NK: torch.Tensor, start: Start | None) -> torch.Tensor:
        """Largest magnitude of each block over the weights of the box, float32 [P, Q]; NaN for a block with a NaN."""

    def encode(
        self,
        weight_NK: torch.Tensor,
        factor_PQ: torch.Tensor,
        start: Start | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Codes [N, K] of the given 8-bit dtype by `CodeFormat.factors`; written to `out`, contiguous, if given."""

    def decode(self, codes_NK: torch.Tensor, scale_PQ: torch.Tensor, start: Start | None) -> torch.Tensor:
        """Values that the engine computes with, float32 [N, K], from codes and sent scales."""


class TorchBackend:
    """Plain torch: any device, dtype and format."""

    def supports(self, format: CodeFormat, device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
        """Always."""
        return True

    def amax(self, weight_NK: torch.Tensor, start: Start | None) -> torch.Tensor:
        """See `Backend`."""
        return row_amax(weight_NK) if start is None else block_amax(weight_NK, start)

    def encode(
        self,
        weight_NK: torch.Tensor,
        factor_PQ: torch.Tensor,
        start: Start | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend`."""
        if dtype == torch.int8:
            return int8_codes(weight_NK, factor_PQ, out)
        if start is None:
            return fp8_channel_codes(weight_NK, factor_PQ, out)
        return fp8_block_codes(weight_NK, factor_PQ, start, out)

    def decode(self, codes_NK: torch.Tensor, scale_PQ: torch.Tensor, start: Start | None) -> torch.Tensor:
        """See `Backend`."""
        if start is None:
            return channel_values(codes_NK, scale_PQ)
        return fp8_block_values(codes_NK, scale_PQ, start)


class NumbaBackend(TorchBackend):
    """Numba kernels for BF16 weights on a CPU (`megatron_rl.cpu.code_loops`); torch decodes INT8."""

    def supports(self, format: CodeFormat, device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
        """On a CPU with at most `MAX_THREADS` threads, for BF16 weights."""
        few_threads = torch.get_num_threads() <= code_loops.MAX_THREADS
        return device.type == "cpu" and few_threads and set(dtypes) <= {torch.bfloat16}

    def amax(self, weight_NK: torch.Tensor, start: Start | None) -> torch.Tensor:
        """See `Backend`."""
        return code_loops.amax_of(weight_NK, start)

    def encode(
        self,
        weight_NK: torch.Tensor,
        factor_PQ: torch.Tensor,
        start: Start | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend`."""
        if dtype == torch.int8:
            return code_loops.int8_of(weight_NK, factor_PQ, out)
        return code_loops.e4m3_of(weight_NK, factor_PQ, start, out)

    def decode(self, codes_NK: torch.Tensor, scale_PQ: torch.Tensor, start: Start | None) -> torch.Tensor:
        """See `Backend`."""
        if codes_NK.dtype == torch.int8:
            return super().decode(codes_NK, scale_PQ, start)
        return code_loops.values_of(codes_NK, scale_PQ, start)


class TransformerEngineBackend(TorchBackend):
    """Transformer Engine's kernel encodes whole blocks; torch does the rest, also blocks cut by a shard's border."""

    def supports(self, format: CodeFormat, device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
        """For `fp8_block` on a CUDA device, where Transformer Engine is installed."""
        return format.in_blocks and device.type == "cuda" and te_kernel.is_installed()

    def encode(
        self,
        weight_NK: torch.Tensor,
        factor_PQ: torch.Tensor,
        start: Start | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend`."""
        if start is not None and te_kernel.has_whole_blocks(weight_NK, start):
            return copied_into(te_kernel.block_codes(weight_NK), out)
        return super().encode(weight_NK, factor_PQ, start, dtype, out)


BACKENDS: Final[list[Backend]] = [TransformerEngineBackend(), NumbaBackend(), TorchBackend()]
"""In order of preference."""


def choose_backend(format: CodeFormat, device: torch.device, dtypes: Collection[torch.dtype]) -> Backend:
    """The first of `BACKENDS` that supports weights of these dtypes on this device."""
    return next(backend for backend in BACKENDS if backend.supports(format, device, dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """A format with the backend that encodes it."""

    format: CodeFormat
    backend: Backend

    def amax(self, weight_NK: torch.Tensor, start: Start) -> torch.Tensor:
        """Largest magnitudes of the blocks that a box touches, over the weights of the box, float32 [P, Q]."""
        return self.backend.amax(weight_NK, self._block_start(start))

    def factors(self, amax_PQ: torch.Tensor) -> torch.Tensor:
        """See `CodeFormat.factors`."""
        return self.format.factors(amax_PQ)

    def scales(self, factor_PQ: torch.Tensor) -> torch.Tensor:
        """See `CodeFormat.scales`."""
        return self.format.scales(factor_PQ)

    def codes(
        self, weight_NK: torch.Tensor, factor_PQ: torch.Tensor, start: Start, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Codes of a box whose blocks have these factors, 8 bits [N, K]; written to `out`, contiguous, if given."""
        return self.backend.encode(weight_NK, factor_PQ, self._block_start(start), self.format.dtype, out)

    def values(self, codes_NK: torch.Tensor, scale_PQ: torch.Tensor, start: Start) -> torch.Tensor:
        """Values that the engine computes with, float32 [N, K], from codes and sent scales."""
        return self.backend.decode(codes_NK, scale_PQ, self._block_start(start))

    def _block_start(self, start: Start) -> Start | None:
        return start if self.format.in_blocks else None
