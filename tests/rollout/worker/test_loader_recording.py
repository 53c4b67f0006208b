"""Loaders copy the received box out of a stand-in, whatever view they have made of it."""

from collections.abc import Iterator

import pytest
import torch

from rollout.weights.manifest import Box, TensorSpec
from rollout.worker.loader_recording import StandIns

MATRIX = torch.arange(24, dtype=torch.float32).view(4, 6)
STACK = torch.arange(24, 24 + 3 * 24, dtype=torch.float32).view(3, 4, 6)
SPECS = (
    TensorSpec(name="matrix.weight", shape=(4, 6), dtype="float32"),
    TensorSpec(name="m.experts.up.weight", shape=(3, 4, 6), dtype="float32"),
)


class Boxes:
    """Parts of tensors in memory."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A view into the middle of a larger array, like a piece of a bucket."""
        whole = {"matrix.weight": MATRIX, "m.experts.up.weight": STACK}[name]
        found = whole[box.slices((0,) * whole.dim())]
        larger = torch.cat([torch.full((5,), -1.0), found.flatten()])
        return larger[5:].view(found.shape)

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Two pieces for each row."""
        *before, row, left = box.start
        *one, rows, columns = box.shape
        for number in range(rows):
            for first, end in ((0, columns // 2), (columns // 2, columns)):
                piece = Box(start=(*before, row + number, left + first), shape=(*one, 1, end - first))
                yield piece, self.read(name, piece)


VIEWS = {
    "whole": lambda one: one,
    "rows": lambda one: one.narrow(0, 1, 2),
    "columns": lambda one: one[:, 2:5],
    "one row": lambda one: one[3],
    "transposed": lambda one: one.t(),
    "box of the transposed": lambda one: one.t()[1:4, 2:],
    "flat": lambda one: one.reshape(-1)[7:],
}


@pytest.mark.parametrize("how", VIEWS)
def test_a_copied_part_equals_the_same_view_of_the_tensor(how: str) -> None:
    shown = dict(StandIns(SPECS).items())
    assert list(shown) == ["matrix.weight", *(f"m.experts.{expert}.up.weight" for expert in range(3))]
    stand_ins = StandIns(SPECS)
    with stand_ins.feed(Boxes()):
        for (_, tensor), real in zip(stand_ins.items(), [MATRIX, *STACK], strict=True):
            expected = VIEWS[how](real)
            found = torch.zeros(expected.shape)
            found.copy_(VIEWS[how](tensor))
            assert torch.equal(found, expected)


def test_a_square_matrix_is_transposed_if_its_loader_transposes_it() -> None:
    square = MATRIX[:, :4].contiguous()

    class Square(Boxes):
        def read(self, name: str, box: Box) -> torch.Tensor:
            return square[box.slices((0, 0))]

    stand_ins = StandIns([TensorSpec(name="square.weight", shape=(4, 4), dtype="float32")])
    found = torch.zeros(4, 4)
    with stand_ins.feed(Square()):
        for _, tensor in stand_ins.items():
            found.copy_(tensor.t())
    assert torch.equal(found, square.t())
