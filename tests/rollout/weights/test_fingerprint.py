"""Fingerprints of weights: independent of the partition, and changed by every fault that moves or damages a row."""

import numpy as np
import pytest
import torch

from megatron_rl.controller.publisher import EXPERT_LENIENCY, MAX_WEIGHT_GAP
from rollout.weights.fingerprint import column_signs, expert_inputs, fold, multiply, of_box, through_expert
from rollout.weights.fingerprint_sums import NUM_GROUPS, NUM_VECTORS, add_up, difference
from rollout.weights.manifest import Box

MATRIX = torch.randn(512, 96, generator=torch.Generator().manual_seed(0))
WHOLE = Box(start=(0, 0), shape=(512, 96))


def sums(matrix: torch.Tensor) -> dict[str, np.ndarray]:
    return {"w": of_box(matrix, Box(start=(0,) * matrix.dim(), shape=tuple(matrix.shape)), tuple(matrix.shape))}


def test_fingerprints_of_parts_sum_to_that_of_the_whole() -> None:
    cuts = [(0, 0, 100, 96), (100, 0, 412, 32), (100, 32, 412, 64)]
    boxes = [Box(start=(r, c), shape=(n, k)) for r, c, n, k in cuts]
    parts = [{"w": of_box(MATRIX[box.slices((0, 0))], box, (512, 96))} for box in boxes]
    assert difference(add_up(parts), sums(MATRIX))[0] < 1e-5
    assert add_up(parts)["w"].shape == (2, NUM_VECTORS, NUM_GROUPS)


def swapped(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cat([matrix[256:], matrix[:256]])


def one_row_doubled(matrix: torch.Tensor, row: int = 17) -> torch.Tensor:
    wrong = matrix.clone()
    wrong[row] *= 2
    return wrong


FAULTS = {
    "halves swapped": swapped,
    "off by a row": lambda matrix: matrix.roll(1, 0),
    "off by a column": lambda matrix: matrix.roll(1, 1),
    "one row doubled": one_row_doubled,
    "scaled": lambda matrix: matrix * 1.1,
    "negated": lambda matrix: -matrix,
    "stale by an update of a tenth": lambda matrix: matrix + 0.1 * torch.randn_like(matrix),
    "zero": torch.zeros_like,
    "columns reversed": lambda matrix: matrix.flip(1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_changes_the_fingerprint_far_beyond_rounding(name: str) -> None:
    torch.manual_seed(1)
    assert difference(sums(FAULTS[name](MATRIX)), sums(MATRIX))[0] > 0.05


def test_any_doubled_row_is_detected_and_named() -> None:
    for row in range(0, 512, 3):
        gap, where = difference(sums(one_row_doubled(MATRIX, row)), sums(MATRIX))
        assert gap > 0.03 and where == f"w, {row // 8 + 1}. of 64 groups of rows"


def test_nine_of_ten_doubled_rows_of_the_largest_matrices_are_detected() -> None:
    """A group has 462 rows; measured over 200 of them: 96 %."""
    random = torch.Generator().manual_seed(0)
    matrix = torch.randn(29_568, 32, generator=random)
    meant, rows = sums(matrix), torch.randint(0, len(matrix), (60,), generator=random).tolist()
    found = [difference(sums(one_row_doubled(matrix, row)), meant)[0] > 0.02 for row in rows]
    assert sum(found) >= 0.9 * len(found)


def test_rounding_stays_far_below_the_bound_even_with_outlier_rows() -> None:
    uneven = MATRIX.clone()
    uneven[100:104] *= 300
    products = multiply(uneven, column_signs(WHOLE, (512, 96))).to(torch.bfloat16)
    assert difference({"w": fold(products, WHOLE, (512, 96))}, sums(uneven))[0] < 0.007


@pytest.mark.parametrize("rows", [1, 5, 64, 1000])
def test_vectors_and_small_tensors_have_fingerprints(rows: int) -> None:
    vector = torch.randn(rows)
    wrong = vector.clone()
    wrong[rows // 2] += 1
    assert difference(sums(vector), sums(vector))[0] == 0
    assert difference(sums(wrong), sums(vector))[0] > 0.05


def test_a_tensor_that_one_side_lacks_is_named() -> None:
    assert difference({}, sums(MATRIX)) == (1.0, "w is known to one side only")


def through_8_bits(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, largest: float) -> torch.Tensor:
    """Output of an expert whose activations are rounded to 8 bits per token before the last matrix."""
    inputs = expert_inputs(gate.shape[1])
    inner = torch.nn.functional.silu(inputs @ gate.t()) * (inputs @ up.t())
    scale = inner.abs().amax(1, keepdim=True) / largest
    codes = (inner / scale).round() if largest == 127 else (inner / scale).to(torch.float8_e4m3fn).float()
    return (codes * scale) @ down.t()


@pytest.mark.parametrize("largest", [127.0, 448.0])
def test_different_experts_in_8_bits_differ_by_far_more_than_activation_rounding(largest: float) -> None:
    random = torch.Generator().manual_seed(0)
    shape, num_experts = (512, 256), 48
    experts = [
        (
            0.02 * torch.randn(256, 512, generator=random),
            0.02 * torch.randn(256, 512, generator=random),
            0.02 * torch.randn(512, 256, generator=random),
        )
        for _ in range(num_experts)
    ]
    whole = Box(start=(0, 0), shape=shape)
    meant = [{"w": fold(through_expert(*one), whole, shape)} for one in experts]
    found = [{"w": fold(through_8_bits(*one, largest), whole, shape)} for one in experts]
    rounding = [difference(*pair)[0] for pair in zip(found, meant, strict=True)]
    exchanged = [difference(*pair)[0] for pair in zip(found, meant[1:], strict=False)]
    assert MAX_WEIGHT_GAP < max(rounding) < MAX_WEIGHT_GAP * EXPERT_LENIENCY / 2
    assert min(exchanged) > 3 * MAX_WEIGHT_GAP * EXPERT_LENIENCY
