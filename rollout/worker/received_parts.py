"""Tensors of one publish on one engine rank, assembled from the pieces in its buckets.

A bucket is taken from the transport when its first piece is needed and released after its last one. Loaders follow the
model's order, so the rank holds little more than the buckets of one layer at a time.

Invariant: a part is returned only if the received pieces cover all of it. A part of a stack belongs to one expert.
"""

import math
from collections.abc import Iterator

import torch

from rollout.transports.base import Inbox
from rollout.weights.manifest import DTYPE_BYTES, Box, Bucket, Piece, WeightManifest


class Arrivals:
    """The parts of one publish on one rank."""

    def __init__(self, manifest: WeightManifest, inbox: Inbox, *, engine_rank: int) -> None:
        self._inbox = inbox
        self._dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
        self._pieces: dict[tuple[str, int], list[tuple[Bucket, Piece]]] = {}
        """By tensor and expert."""
        self._left: dict[int, int] = {}
        """Elements of each bucket that have not been returned yet."""
        for bucket in manifest.buckets:
            if bucket.required_by(engine_rank):
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
        whole: torch.Tensor | None = None
        for common, piece in self.pieces(name, box):
            if common == box:
                whole = piece
                break
            if whole is None:
                whole = piece.new_empty(box.shape)
            whole[common.slices(box.start)] = piece
        assert whole is not None, "a part that is not empty has pieces"
        if whole.dim() < 2:  # a copy: a few bytes must not hold a bucket
            whole = self._vectors[name, box] = whole.clone()
        return whole

    def pieces(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """The same part, uncopied: its boxes, and for each a view of the bucket that holds it.

        A bucket is released when the next piece is requested, if the caller has dropped its view by then.

        Raises:
            RuntimeError: as `part`.
        """
        of_matrix = self._pieces.get((name, box.expert), [])
        found = [(bucket, piece, box.common(piece.box)) for bucket, piece in of_matrix]
        found = [(bucket, piece, common) for bucket, piece, common in found if common.size]
        if (size := sum(common.size for _, _, common in found)) != box.size:
            raise RuntimeError(f"{name}: {size} of the {box.size} elements that are loaded were sent to this rank")
        for bucket, piece, common in found:
            view = self._take(bucket, piece, self._dtypes[name])[common.slices(piece.start)]
            self._let_go(bucket, common.size)
            yield common, view
            del view

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
