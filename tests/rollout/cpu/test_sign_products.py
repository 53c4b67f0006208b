"""Products with signs from codes on a CPU equal those of decoded values, in every format and for every box."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.quantization.backends import Quantizer, TorchBackend
from megatron_rl.quantization.formats import CODE_FORMATS
from rollout.cpu.sign_products import code_products, supports, value_products
from rollout.weights.fingerprint import column_signs, products_of
from rollout.weights.manifest import Box

ROUNDING = 1e-6
"""Largest difference over the summed magnitudes of a row: sums of at most 64 float32 numbers."""


def decoded_products(values: torch.Tensor, box: Box, shape: tuple[int, int]) -> torch.Tensor:
    """Each of the four products by itself, in float64."""
    return column_signs(box, shape).double() @ values.double().t()


boxes = st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 90), st.integers(1, 290))


@settings(deadline=None, max_examples=40)
@given(place=boxes, name=st.sampled_from(["bf16", *CODE_FORMATS]), seed=st.integers(0, 99))
def test_products_of_a_box_equal_those_of_its_decoded_values(place, name, seed):
    top, left, rows, columns = place
    box, shape = Box(start=(top, left), shape=(rows, columns)), (top + rows + 7, left + columns + seed)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    weight[0, 0] = 2.0**-9  # an e4m3 code below the normal numbers, in most blocks
    if name == "bf16":
        values, found = weight.float(), value_products(weight, box, shape)
    else:
        format = Quantizer(format=CODE_FORMATS[name], backend=TorchBackend())
        factors = format.factors(format.amax(weight, box.start))
        codes, scales = format.codes(weight, factors, box.start), format.scales(factors)
        values, found = format.values(codes, scales, box.start), format.products(codes, scales, box, shape)
        assert supports(codes)
    difference = (found - decoded_products(values, box, shape)).abs()
    assert (difference <= ROUNDING * values.abs().sum(1)).all()


def test_every_e4m3_code_is_multiplied_by_its_number():
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = numbers[~numbers.float().isnan()].unsqueeze(1)
    box = Box(start=(0, 0), shape=(254, 1))
    found = code_products(codes, torch.ones(254, 1), box, (254, 40), block=None)
    assert torch.equal(found, column_signs(box, (254, 40)) * codes.float().t())


def test_the_four_vectors_of_signs_are_orthogonal_and_not_those_of_the_rows():
    for size in (64, 128, 1024, 5120):
        signs = column_signs(Box(start=(0, 0), shape=(size, size)), (size, size))
        assert torch.equal(signs @ signs.t(), size * torch.eye(4))
        assert signs.is_contiguous()  # which kernels of engines require of their inputs


def test_products_of_boxes_side_by_side_add_up():
    weight = torch.randn(40, 200).bfloat16()
    whole = products_of(weight.float(), Box(start=(0, 0), shape=(40, 200)), (40, 200))
    cuts = [(0, 70), (70, 1), (71, 129)]
    parts = [
        value_products(weight[:, left : left + width].contiguous(), Box(start=(0, left), shape=(40, width)), (40, 200))
        for left, width in cuts
    ]
    torch.testing.assert_close(sum(parts), whole, atol=1e-4, rtol=0)
