"""What one engine rank has been sent in a publish, as parts of tensors.

Buckets are taken from the transport when the first of their pieces is needed and let go after the last, so that memory
follows the model's order: little more than the buckets of one layer is held at a time.

Invariant: a part is given only if pieces that arrived make up all of it. A part of a stack is of one expert.
"""

import math

import torch

from rollout.transports.base import Inbox
from rollout.wire import DTYPE_BYTES, Box, Bucket, Piece, WeightManifest


class Arrivals:
    """The parts of one publish on one rank."""

    def __init__(self, manifest: WeightManifest, inbox: Inbox, *, engine_rank: int) -> None:
        self._inbox = inbox
        self._dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
        self._pieces: dict[tuple[str, int], list[tuple[Bucket, Piece]]] = {}
        """By tensor and expert."""
        self._left: dict[int, int] = {}
        """Elements of each bucket that nobody has been given."""
        for bucket in manifest.buckets:
            if bucket.wanted_by(engine_rank):
                self._left[bucket.index] = sum(piece.box.size for piece in bucket.pieces)
                for piece in bucket.pieces:
                    matrix = manifest.tensors[piece.tensor].name, piece.box.expert
                    self._pieces.setdefault(matrix, []).append((bucket, piece))
        self._held: dict[int, torch.Tensor] = {}
        self._vectors: dict[tuple[str, Box], torch.Tensor] = {}

    def part(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor, of the box's shape; a view of a bucket where one piece is all of it.

        A vector may be asked for again (vLLM loads biases twice), a matrix once.

        Raises:
            RuntimeError: not all of it was sent to this rank, or it was given before.
        """
        if (name, box) in self._vectors:
            return self._vectors[name, box]
        if not box.size:
            return torch.empty(box.shape, dtype=getattr(torch, self._dtypes[name]))
        of_matrix = self._pieces.get((name, box.expert), [])
        found = [(bucket, piece, box.common(piece.box)) for bucket, piece in of_matrix]
        found = [(bucket, piece, common) for bucket, piece, common in found if common.size]
        if (size := sum(common.size for _, _, common in found)) != box.size:
            raise RuntimeError(f"{name}: {size} of the {box.size} elements that are loaded were sent to this rank")
        dtype = self._dtypes[name]
        boxes = [
            (common, self._take(bucket, piece, dtype)[common.slices(piece.start)]) for bucket, piece, common in found
        ]
        for bucket, _, common in found:
            self._let_go(bucket, common.size)
        whole = boxes[0][1] if len(boxes) == 1 else _joined(box, boxes)
        if whole.dim() < 2:  # a copy: a few bytes must not hold a bucket
            whole = self._vectors[name, box] = whole.clone()
        return whole

    def _take(self, bucket: Bucket, piece: Piece, dtype: str) -> torch.Tensor:
        index = bucket.index
        if self._left[index] <= 0:
            raise RuntimeError(f"bucket {index} was let go of, all of it having been loaded; no matrix is loaded twice")
        if index not in self._held:
            self._held[index] = self._inbox.take(bucket)
        count = math.prod(piece.shape)
        raw = self._held[index][piece.offset : piece.offset + count * DTYPE_BYTES[dtype]]
        return raw.view(getattr(torch, dtype)).view(piece.shape)

    def _let_go(self, bucket: Bucket, num_elements: int) -> None:
        self._left[bucket.index] -= num_elements
        if self._left[bucket.index] <= 0:
            self._held.pop(bucket.index, None)


def _joined(box: Box, boxes: list[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    whole = boxes[0][1].new_empty(box.shape)
    for common, part in boxes:
        whole[common.slices(box.start)] = part
    return whole
