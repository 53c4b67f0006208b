"""A few sums per tensor by which two sides can tell that they hold the same weights, row by row.

A matrix [N, K] is multiplied by four vectors of signs. The products of its rows, again multiplied by signs, are summed
in at most 64 groups of neighbouring rows. Every 8-bit format holds signs exactly, so an engine computes these sums with
the kernels that it samples with. The remaining difference to the trainer's codes is the rounding of the engine's
outputs: some thousandths. A wrong, missing or exchanged row changes its group by about one part in the square root of
the group's size, unless its product is close to 0 for all four vectors, which is rare. Vectors (norms, biases) are
summed in the same way without a product.

One kernel computes all three matrices of an expert, so the sums are of the expert's outputs for the signs, as if they
were the product with its last matrix. They distinguish experts, and show a fault of a whole matrix, but not one wrong
row among thousands.

Sums of boxes of a tensor add up to the tensor's sums: every rank of either side returns its own, and no rank gathers
weights. So do products: those of boxes side by side add up to the products of their rows. Both sides take products
while a tensor is in a cache: the trainer when it packs a box, the engine when it has loaded a layer.

Shape legend: N rows, K columns, S vectors of signs (1 for vectors), G groups.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from rollout.weights.fingerprint_sums import NUM_GROUPS, NUM_VECTORS
from rollout.weights.manifest import Box

_AT_ONCE, _AT_ONCE_ON_DEVICE = 1 << 18, 1 << 23
"""Elements of a matrix that are converted to float32 at a time."""
Sums = npt.NDArray[np.float64]


@lru_cache(maxsize=256)
def row_signs(num_rows: int) -> npt.NDArray[np.float64]:
    """Signs of the rows of a tensor: [N], shared and not to be modified."""
    signs: npt.NDArray[np.float64] = _signs(num_rows, num_rows).double().numpy()
    return signs


@lru_cache(maxsize=256)
def _column_signs(num_columns: int) -> torch.Tensor:
    return _signs(num_columns, NUM_VECTORS * num_columns).view(NUM_VECTORS, num_columns)


def _signs(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


def column_signs(box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Signs that a box of a matrix is multiplied by: float32 [S, columns of the box]."""
    return _column_signs(shape[1])[:, box.start[1] : box.start[1] + box.shape[1]]


def fold(products: torch.Tensor, box: Box, shape: tuple[int, ...]) -> Sums:
    """Sums of a box's rows and of their squares, float64 [2, S, G].

    Args:
        products: of each row of the box with `column_signs`, [S, rows]; for a vector its elements, [1, rows].
        box: the box.
        shape: shape of the whole tensor.
    """
    sums = np.zeros((2, len(products), NUM_GROUPS))
    first, num_rows = box.start[0], box.shape[0]
    if num_rows:
        signed = products.detach().double().cpu().numpy() * row_signs(shape[0])[first : first + num_rows]
        starts, groups = _runs_of_groups(first, num_rows, shape[0])
        sums[0][:, groups] = np.add.reduceat(signed, starts, axis=1)
        sums[1][:, groups] = np.add.reduceat(np.square(signed), starts, axis=1)
    return sums


@lru_cache(maxsize=1024)
def _runs_of_groups(first: int, num_rows: int, whole: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First row in the box of each group that it touches, and the numbers of those groups."""
    of_row = np.arange(first, first + num_rows) * NUM_GROUPS // whole
    groups, starts = np.unique(of_row, return_index=True)
    return starts, groups


def of_box(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> Sums:
    """Sums of a box with these values, [rows, columns] or [rows]: float64 [2, S, G]."""
    return fold(products_of(values, box, shape), box, shape)


def products_of(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Products of a box's rows with `column_signs`, float32 [S, rows]; a vector's elements, [1, rows]."""
    if values.dim() < 2:
        return values.float().unsqueeze(0)
    return multiply(values, column_signs(box, shape))


def through_expert(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Outputs of an expert, or of some of its inner rows, for `expert_inputs`: float32 [S, H].

    Args:
        gate: [F, H].
        up: [F, H].
        down: [H, F].
    """
    inputs = expert_inputs(gate.shape[1])
    inner = torch.nn.functional.silu(multiply(gate, inputs)) * multiply(up, inputs)
    return multiply(down, inner)


def expert_inputs(hidden_size: int) -> torch.Tensor:
    """Inputs of an expert: signs, float32 [S, H]."""
    return _column_signs(hidden_size)


def multiply(matrix: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Products [S, N] of rows with vectors [S, K] in float32, without a float32 copy of the whole matrix."""
    vectors = vectors.to(matrix.device)
    num_rows = max((_AT_ONCE_ON_DEVICE if matrix.is_cuda else _AT_ONCE) // max(matrix.shape[1], 1), 1)
    return torch.cat([vectors @ rows.float().t() for rows in torch.split(matrix, num_rows)], dim=1)
