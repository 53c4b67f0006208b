"""A publisher in a few lines: cuts tensors as trainer ranks would own them and packs them into buckets."""

from dataclasses import dataclass

import torch

from rollout.transports.base import Sender
from rollout.types import WeightVersion
from rollout.wire import PIECE_ALIGNMENT, TRAILER, Bucket, Piece, TensorSpec, WeightManifest

RUN_ID = "testrun"


@dataclass(frozen=True)
class Publish:
    manifest: WeightManifest
    payloads: dict[int, list[tuple[int, bytes]]]
    """Bucket index to (offset, bytes) of its pieces."""

    def send(self, sender: Sender, rank: int = 0, *, only: int | None = None) -> str:
        """Send one rank's buckets (`only` the first so many)."""
        own = [bucket for bucket in self.manifest.buckets if bucket.source_rank == rank]
        sender.open(self.manifest.weight_version, own)
        for bucket in own[:only]:
            view = sender.buffer(bucket.index)
            for offset, data in self.payloads[bucket.index]:
                view[offset : offset + len(data)] = data
            del view
            sender.commit(bucket.index)
        return sender.finish()


def pack(
    tensors: dict[str, torch.Tensor],
    version: int,
    format: str,
    *,
    num_ranks: int = 1,
    bucket_bytes: int = 64 << 10,
    run_id: str = RUN_ID,
) -> Publish:
    """Cut every tensor over `num_ranks` (columns of o_proj and down_proj, else rows) and fill buckets in order."""
    specs = [
        TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]
    filling: dict[int, tuple[list[Piece], list[tuple[int, bytes]], int]] = {}
    buckets: list[Bucket] = []
    payloads: dict[int, list[tuple[int, bytes]]] = {}

    def flush(rank: int) -> None:
        pieces, parts, end = filling.pop(rank, ([], [], 0))
        if pieces:
            index = len(buckets)
            buckets.append(Bucket(index=index, source_rank=rank, num_bytes=end + TRAILER.size, pieces=tuple(pieces)))
            payloads[index] = parts

    for number, (name, tensor) in enumerate(tensors.items()):
        dim = 1 if ("o_proj" in name or "down_proj" in name) and tensor.ndim == 2 and tensor.shape[1] > 1 else 0
        count = num_ranks if tensor.shape[dim] % num_ranks == 0 and "norm" not in name else 1
        start = [0] * tensor.ndim
        for rank, box in enumerate(tensor.chunk(count, dim)):
            data = box.contiguous().view(torch.uint8).numpy().tobytes()
            if rank in filling and filling[rank][2] + len(data) > bucket_bytes:
                flush(rank)
            pieces, parts, end = filling.get(rank, ([], [], 0))
            pieces.append(Piece(tensor=number, start=tuple(start), shape=tuple(box.shape), offset=end))
            parts.append((end, data))
            end += -(-len(data) // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
            filling[rank] = (pieces, parts, end)
            start[dim] += box.shape[dim]
    for rank in sorted(filling):
        flush(rank)
    manifest = WeightManifest(
        run_id=run_id,
        weight_version=WeightVersion(version),
        format=format,
        tensors=tuple(specs),
        buckets=tuple(buckets),
    )
    return Publish(manifest, payloads)
