"""Tensors of one publish on one engine rank, assembled from the pieces in its buckets.

A bucket is taken from the transport when its first piece is needed and released after its last one. Loaders follow the
model's order, so the rank holds little more than the buckets of one layer at a time.

Invariant: a box is returned only if the received pieces cover all of it. A box of a stack belongs to one expert.
"""

import math
from collections.abc import Iterator

import torch

from rollout.transports.base import Inbox
from rollout.weights.manifest import DTYPE_BYTES, Box, Bucket, Piece, WeightManifest


class ReceivedPieces:
    """Boxes of the tensors of one publish on one rank; satisfies `rollout.worker.loader_recording.BoxSource`."""

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

    def read(self, name: str, box: Box) -> torch.Tensor:
        """One box of a tensor, in the box's shape; a view of the bucket if one piece covers the box.

        A vector may be read again, because vLLM loads biases twice; a matrix may be read once.

        Raises:
            RuntimeError: this rank did not receive all of the box, or it was read before.
        """
        if (name, box) in self._vectors:
            return self._vectors[name, box]
        if not box.size:
            return torch.empty(box.shape, dtype=getattr(torch, self._dtypes[name]))
        whole: torch.Tensor | None = None
        for common, view in self.views(name, box):
            if common == box:
                whole = view
                break
            if whole is None:
                whole = view.new_empty(box.shape)
            whole[common.slices(box.start)] = view
        assert whole is not None, "a box that is not empty has pieces"
        if whole.dim() < 2:  # a copy, so that a few bytes do not keep a bucket in memory
            whole = self._vectors[name, box] = whole.clone()
        return whole

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """The same box without a copy: the boxes that make it up, and for each a view of the bucket that holds it.

        A bucket is released when the next piece is requested, if the caller has dropped its view by then.

        Raises:
            RuntimeError: as `read`.
        """
        of_matrix = self._pieces.get((name, box.expert), [])
        overlaps = [(bucket, piece, box.common(piece.box)) for bucket, piece in of_matrix]
        overlaps = [(bucket, piece, common) for bucket, piece, common in overlaps if common.size]
        if (size := sum(common.size for _, _, common in overlaps)) != box.size:
            raise RuntimeError(f"{name}: this rank received {size} of the {box.size} elements that it loads")
        for bucket, piece, common in overlaps:
            view = self._take(bucket, piece, self._dtypes[name])[common.slices(piece.start)]
            self._count_read(bucket, common.size)
            yield common, view
            del view

    def _take(self, bucket: Bucket, piece: Piece, dtype: str) -> torch.Tensor:
        index = bucket.index
        if self._left[index] <= 0:
            raise RuntimeError(f"bucket {index} was read completely and released; a matrix cannot be loaded twice")
        if index not in self._held:
            self._held[index] = self._inbox.take(bucket)
        count = math.prod(piece.shape)
        raw = self._held[index][piece.offset : piece.offset + count * DTYPE_BYTES[dtype]]
        return raw.view(getattr(torch, dtype)).view(piece.shape)

    def _count_read(self, bucket: Bucket, num_elements: int) -> None:
        self._left[bucket.index] -= num_elements
        if self._left[bucket.index] <= 0:
            self._held.pop(bucket.index, None)
