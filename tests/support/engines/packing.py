"""A small publisher: cuts tensors like trainer ranks and packs them into buckets."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from rollout.transports.base import Sender
from rollout.types import WeightVersion
from rollout.weights.manifest import PIECE_ALIGNMENT, TRAILER, Box, Bucket, Piece, Required, TensorSpec, WeightManifest

RUN_ID = "testrun"


@dataclass(frozen=True)
class Publish:
    manifest: WeightManifest
    payloads: dict[int, list[tuple[int, bytes]]]
    """Bucket index to (offset, bytes) of its pieces."""

    def send(self, sender: Sender, rank: int = 0, *, only: int | None = None) -> str:
        """Send one rank's buckets, `only` the first ones if given."""
        own = [bucket for bucket in self.manifest.buckets if bucket.source_rank == rank]
        sender.open(self.manifest.weight_version, own)
        for bucket in own[:only]:
            view = sender.buffer(bucket.index)
            for offset, data in self.payloads[bucket.index]:
                view[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            del view
            sender.commit(bucket.index)
        return sender.finish()


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors under their names in a publish: experts of a layer are stacks."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda entry: [int(part) for part in re.findall(r"\d+", entry[0])]):
        found.setdefault(re.sub(r"(\.experts)\.\d+\.", r"\1.", name), []).append(tensor)
    return {name: torch.stack(parts) if ".experts." in name else parts[0] for name, parts in found.items()}


def pack(
    tensors: dict[str, torch.Tensor],
    version: int,
    format: str,
    *,
    num_ranks: int = 1,
    bucket_bytes: int = 64 << 10,
    run_id: str = RUN_ID,
    required: Sequence[Required] = (),
) -> Publish:
    """Cut every tensor over `num_ranks` (columns of o_proj and down_proj, else rows) and fill buckets in order.

    If the boxes that engine ranks require tile a tensor, it is cut into those boxes; each goes to its ranks.
    """
    specs = [
        TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]
    filling: dict[tuple[int, tuple[int, ...]], tuple[list[Piece], list[tuple[int, bytes]], int]] = {}
    buckets: list[Bucket] = []
    payloads: dict[int, list[tuple[int, bytes]]] = {}

    def flush(key: tuple[int, tuple[int, ...]]) -> None:
        pieces, parts, end = filling.pop(key, ([], [], 0))
        if pieces:
            index, (rank, takers) = len(buckets), key
            size = end + TRAILER.size
            bucket = Bucket(index=index, source_rank=rank, num_bytes=size, pieces=tuple(pieces), engine_ranks=takers)
            buckets.append(bucket)
            payloads[index] = parts

    for number, (name, tensor) in enumerate(tensors.items()):
        dim = 1 if ("o_proj" in name or "down_proj" in name) and tensor.ndim == 2 and tensor.shape[1] > 1 else 0
        count = num_ranks if tensor.shape[dim] % num_ranks == 0 and "norm" not in name else 1
        cuts = _parts(tensor, [one[name] for one in required])
        if not cuts:
            start = [0] * tensor.ndim
            for part in tensor.chunk(count, dim):
                cuts.append((Box(start=tuple(start), shape=tuple(part.shape)), ()))
                start[dim] += part.shape[dim]
        for turn, (box, takers) in enumerate(cuts):
            key = (turn % num_ranks, takers)
            data = tensor[box.slices((0,) * tensor.ndim)].contiguous().view(torch.uint8).numpy().tobytes()
            if key in filling and filling[key][2] + len(data) > bucket_bytes:
                flush(key)
            pieces, parts, end = filling.get(key, ([], [], 0))
            pieces.append(Piece(tensor=number, start=box.start, shape=box.shape, offset=end))
            parts.append((end, data))
            end += -(-len(data) // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
            filling[key] = (pieces, parts, end)
    for key in sorted(filling):
        flush(key)
    manifest = WeightManifest(
        run_id=run_id,
        weight_version=WeightVersion(version),
        format=format,
        tensors=tuple(specs),
        buckets=tuple(buckets),
    )
    return Publish(manifest, payloads)


def _parts(tensor: torch.Tensor, required: Sequence[tuple[Box, ...]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Required boxes with their ranks; empty if all ranks require one box, or if the boxes do not tile the tensor."""
    takers: dict[Box, tuple[int, ...]] = {}
    for rank, boxes in enumerate(required):
        for box in boxes:
            takers[box] = (*takers.get(box, ()), rank)
    whole = sum(box.size for box in takers) == tensor.numel()
    apart = not any(a.common(b).size for a, b in combinations(takers, 2))
    return sorted(takers.items(), key=lambda entry: entry[0].start) if whole and apart and len(takers) > 1 else []
