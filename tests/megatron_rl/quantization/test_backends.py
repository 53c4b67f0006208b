"""Every backend gives the bytes of a naive reference, and a packer gets the backend that fits its weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.cpu import code_loops
from megatron_rl.quantization import formats, fp8, te_kernel
from megatron_rl.quantization.backends import (
    NumbaBackend,
    Quantizer,
    TorchBackend,
    TransformerEngineBackend,
    choose_backend,
)
from megatron_rl.quantization.formats import CODE_FORMATS

CPU = torch.device("cpu")
NAMES = sorted(CODE_FORMATS)
ON_HOST = [TorchBackend(), NumbaBackend()]
ON_DEVICE = [TorchBackend(), TransformerEngineBackend()] if torch.cuda.is_available() else []
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""Numbers of the codes from 0 to 448, rising."""


def backends_for(name: str) -> list[tuple[Quantizer, torch.device]]:
    """Every backend that this machine has, each with a device."""
    format, places = CODE_FORMATS[name], [(one, CPU) for one in ON_HOST]
    places += [(one, torch.device("cuda")) for one in ON_DEVICE if one.supports(format, torch.device("cuda"), [])]
    return [(Quantizer(format=format, backend=backend), device) for backend, device in places]


def naive_e4m3(scaled: np.ndarray) -> np.ndarray:
    """Code of the nearest number, ties to the even code, at most 448."""
    size = np.minimum(np.abs(scaled), np.float32(448)).astype(np.float64)
    above = np.minimum(np.searchsorted(E4M3, size), 126)
    below = np.maximum(above - 1, 0)
    up, down = E4M3[above] - size, size - E4M3[below]
    codes = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (codes | np.where(np.signbit(scaled), 0x80, 0)).astype(np.uint8)


def spread(grid: np.ndarray, name: str, shape: tuple[int, int], start: tuple[int, int]) -> np.ndarray:
    """Values [rows, columns]: for each weight that of its block."""
    if name != "fp8_block":
        return np.broadcast_to(grid, shape)
    rows, columns = ((np.arange(size) + first % 128) // 128 for size, first in zip(shape, start, strict=True))
    return grid[rows][:, columns]


def naive_amax(weight: np.ndarray, name: str, start: tuple[int, int]) -> np.ndarray:
    if name != "fp8_block":
        return np.abs(weight).max(axis=1, keepdims=True)
    rows, columns = ((np.arange(size) + first % 128) // 128 for size, first in zip(weight.shape, start, strict=True))
    found = np.zeros((rows[-1] + 1, columns[-1] + 1), dtype=np.float32)
    np.maximum.at(found, (rows[:, None], columns[None, :]), np.abs(weight))
    return found


def naive_codes(weight: np.ndarray, factors: np.ndarray, name: str) -> np.ndarray:
    if name == "int8":
        return np.clip(np.rint(weight / factors), -127, 127).astype(np.int8).view(np.uint8)
    return naive_e4m3(weight * factors)


def naive_values(codes: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    if name == "int8":
        return codes.view(np.int8).astype(np.float32) * scales
    return np.copysign(E4M3[codes & 0x7F], np.where(codes & 0x80, -1, 1)).astype(np.float32) * scales


def weights(shape: tuple[int, int], seed: int, *, is_cut: bool) -> torch.Tensor:
    """Magnitudes over many powers of two, some below the smallest normal code; a row of zeros; perhaps a view."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    wide = torch.randn(rows, 2 * columns, generator=generator)
    wide *= torch.randn(rows, 1, generator=generator).mul(6).exp2()
    wide[:, ::7] *= 2.0**-12
    wide[rows // 2] = 0.0
    return wide.bfloat16()[:, columns // 2 :][:, :columns] if is_cut else wide.bfloat16()[:, :columns].contiguous()


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    start=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    seed=st.integers(0, 2**31),
    is_cut=st.booleans(),
)
def test_every_backend_gives_the_bytes_of_a_naive_reference(
    name: str, shape: tuple[int, int], start: tuple[int, int], seed: int, is_cut: bool
) -> None:
    weight = weights(shape, seed, is_cut=is_cut)
    exact, format = weight.float().numpy(), CODE_FORMATS[name]
    largest = torch.from_numpy(naive_amax(exact, name, start))
    factors = format.factors(largest)
    scales = format.scales(factors)
    codes = naive_codes(exact, spread(factors.numpy(), name, shape, start), name)
    values = naive_values(codes, spread(scales.numpy(), name, shape, start), name)
    for quantizer, device in backends_for(name):
        on_device = weight.to(device)
        assert torch.equal(quantizer.amax(on_device, start).cpu(), largest)
        found = quantizer.codes(on_device, factors.to(device), start)
        out = torch.zeros_like(found)
        assert quantizer.codes(on_device, factors.to(device), start, out) is out
        assert torch.equal(out.view(torch.uint8), found.view(torch.uint8))
        assert np.array_equal(found.cpu().view(torch.uint8).numpy(), codes)
        assert np.array_equal(quantizer.values(found, scales.to(device), start).cpu().numpy(), values)


@pytest.mark.parametrize("name", NAMES)
def test_scales_may_be_larger_than_a_slice_needs(name: str) -> None:
    weight, start = weights((70, 200), 1, is_cut=True), (100, 60)
    format, generator = CODE_FORMATS[name], torch.Generator().manual_seed(2)
    amax = ON_HOST[0].amax(weight, start if format.in_blocks else None)
    factors = format.factors(amax * (1 + torch.rand(amax.shape, generator=generator)).bfloat16().float())
    expected = naive_codes(weight.float().numpy(), spread(factors.numpy(), name, (70, 200), start), name)
    for quantizer, device in backends_for(name):
        found = quantizer.codes(weight.to(device), factors.to(device), start)
        assert np.array_equal(found.cpu().view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize("backend", ON_HOST, ids=lambda one: type(one).__name__)
def test_row_maxima_equal_torchs_even_with_infinities_and_nan(backend: TorchBackend) -> None:
    rows = torch.randn(40, 33, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows[0], rows[1, 3], rows[2, 4], rows[3] = 0.0, float("inf"), float("-inf"), -0.0
    rows[4, 5:7] = torch.tensor([1e-40, -9e-41])  # subnormal
    for some in (rows, rows[:, 3:30], rows.t()):
        assert torch.equal(backend.amax(some, None), some.float().abs().amax(1, keepdim=True))
    rows[5, 6], rows[6, 7] = float("nan"), -float("nan")
    assert backend.amax(rows, None).isnan().view(-1).nonzero().view(-1).tolist() == [5, 6]


def test_compiled_loops_round_every_number_as_torch_does() -> None:
    """All finite BF16 numbers times 1; they include every midpoint between codes."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    weight = bits.view(torch.bfloat16)
    weight = weight[weight.isfinite()].view(2, -1)
    ones = torch.ones(2, 1)
    for loops, torchs in (
        (code_loops.e4m3_of(weight, ones, None), fp8.fp8_channel_codes(weight.float(), ones)),
        (code_loops.int8_of(weight, ones), formats.int8_codes(weight.float(), ones)),
    ):
        assert torch.equal(loops.view(torch.uint8), torchs.view(torch.uint8))


def test_a_backend_is_chosen_by_device_dtype_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, bf16 = torch.device("cuda"), [torch.bfloat16]
    monkeypatch.setattr(torch, "get_num_threads", lambda: code_loops.MAX_THREADS)
    monkeypatch.setattr(te_kernel, "is_installed", lambda: True)

    def chosen(name: str, device: torch.device, dtypes: list[torch.dtype]) -> type:
        return type(choose_backend(CODE_FORMATS[name], device, dtypes))

    for name in NAMES:
        assert chosen(name, CPU, bf16) is NumbaBackend
        assert chosen(name, CPU, [torch.float32, torch.bfloat16]) is TorchBackend
        assert chosen(name, cuda, bf16) is (TransformerEngineBackend if name == "fp8_block" else TorchBackend)
    monkeypatch.setattr(te_kernel, "is_installed", lambda: False)
    assert chosen("fp8_block", cuda, bf16) is TorchBackend
    monkeypatch.setattr(torch, "get_num_threads", lambda: code_loops.MAX_THREADS + 1)
    assert chosen("int8", CPU, bf16) is TorchBackend
