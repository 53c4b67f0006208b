"""A few sums by which two sides can tell that they hold the same weights, row by row.

A matrix [N, K] is multiplied by four vectors of signs, and the products of its rows, with signs again, are added up in
at most 64 groups of neighbouring rows. Signs are what every 8-bit format holds exactly, so an engine gets these sums
through the very kernels that it samples with, and what is left of a difference to the trainer's own codes is the
rounding of its outputs: thousandths. A row that is wrong, missing or another row's changes its group by about one part
in the square root of the group's size, unless its product is next to nothing, which four vectors hardly ever agree on.
Vectors (norms, biases) are added up in the same way without a product.

An expert's three matrices are one kernel's business: what is summed up is what the expert makes of the signs, as if it
were the product with its last matrix. That tells one expert from another and a fault of any of its matrices as a whole,
but not one wrong row among thousands.

Sums of parts of a tensor add up to the tensor's: ranks of either side give theirs, and nobody gathers weights.

Shape legend: N rows, K columns, S vectors of signs (1 for vectors), G groups.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from rollout.weights.fingerprint_sums import NUM_GROUPS, NUM_VECTORS
from rollout.weights.manifest import Box

_AT_ONCE, _AT_ONCE_ON_DEVICE = 1 << 18, 1 << 23
"""Elements of a matrix that are in float32 at a time."""


@lru_cache(maxsize=256)
def row_signs(num_rows: int) -> torch.Tensor:
    """Of any tensor with so many rows: float64 [N], not to be written to."""
    return _signs(num_rows, num_rows).double()


@lru_cache(maxsize=256)
def _column_signs(num_columns: int) -> torch.Tensor:
    return _signs(num_columns, NUM_VECTORS * num_columns).view(NUM_VECTORS, num_columns)


def _signs(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


def column_signs(box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """What a box of a matrix is multiplied by: float32 [S, columns of the box]."""
    return _column_signs(shape[1])[:, box.start[1] : box.start[1] + box.shape[1]]


def fold(products: torch.Tensor, box: Box, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Sums of a box's rows and of their squares, float64 [2, S, G].

    Args:
        products: of each row of the box with `column_signs`, [S, rows]; of a vector its elements, [1, rows].
        box: where it lies.
        shape: of the whole tensor.
    """
    rows = torch.arange(box.start[0], box.start[0] + box.shape[0])
    signed = products.detach().double().cpu() * row_signs(shape[0])[rows]
    both = torch.stack([signed, signed.square()])
    sums = torch.zeros(2, len(products), NUM_GROUPS, dtype=torch.float64)
    found: npt.NDArray[np.float64] = sums.index_add_(2, rows * NUM_GROUPS // shape[0], both).numpy()
    return found


def of_box(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Sums of a box whose values are at hand, [rows, columns] or [rows]."""
    products = multiply(values, column_signs(box, shape)) if values.dim() == 2 else values.unsqueeze(0)
    return fold(products, box, shape)


def through_expert(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """What an expert, or the part of it that has some of its inner rows, makes of `expert_inputs`: float32 [S, H].

    Args:
        gate: [F, H].
        up: [F, H].
        down: [H, F].
    """
    inputs = expert_inputs(gate.shape[1])
    inner = torch.nn.functional.silu(multiply(gate, inputs)) * multiply(up, inputs)
    return multiply(down, inner)


def expert_inputs(hidden_size: int) -> torch.Tensor:
    """What an expert is given: float32 [S, H]."""
    return _column_signs(hidden_size)


def multiply(matrix: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Products [S, N] of rows with vectors [S, K] in float32, without a copy of the whole matrix in it."""
    vectors = vectors.to(matrix.device)
    num_rows = max((_AT_ONCE_ON_DEVICE if matrix.is_cuda else _AT_ONCE) // max(matrix.shape[1], 1), 1)
    return torch.cat([vectors @ rows.float().t() for rows in torch.split(matrix, num_rows)], dim=1)
