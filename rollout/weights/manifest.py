"""The wire format of weights: flat byte buckets, and the manifest that says which bytes belong to which tensor.

A publish moves tensors under their Hugging Face names. Codes and scales are separate tensors, as in a quantised
checkpoint: `X.weight` and `X.weight_scale`. A matrix that every expert of a layer has travels as one *stack*, [experts,
rows, columns], under a name without the expert's number. Each trainer rank cuts the tensors that it owns into *pieces*
(boxes of a tensor, each of one expert) and packs them into *buckets*: contiguous bytes that a transport moves without
knowing their meaning. Every bucket ends in a trailer, by which its reader verifies that the bucket is complete and
belongs to the right publish before a byte of it is applied.

Invariants (`WeightManifest.check`): the pieces of a tensor tile it exactly once, each in one matrix. Pieces of a bucket
do not overlap, are aligned to `PIECE_ALIGNMENT` and lie before its trailer. Buckets are numbered 0..n-1 in the order in
which a streaming transport sends them.

Nothing here imports torch: controllers and tests read manifests without it.
"""

import math
import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rollout.types import WeightVersion

PIECE_ALIGNMENT = 64
"""Alignment in bytes, so that a reader can view any dtype in place."""

TRAILER = struct.Struct("<QqQ")
"""Magic, weight version, xxh3-64 of the payload."""

MAGIC = 0x4D52_4C42_554B_4554

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}


_EXPERTS = ".experts."


def stack_of(name: str) -> str:
    """Name of the stack that holds an expert's tensor; other names, also those of stacks, are returned unchanged."""
    parent, separator, rest = name.partition(_EXPERTS)
    number, _, leaf = rest.partition(".")
    return parent + separator + leaf if number.isdigit() else name


def of_expert(stack: str, expert: int) -> str:
    """Name of one expert's tensor in a stack."""
    parent, separator, rest = stack.partition(_EXPERTS)
    return f"{parent}{separator}{expert}.{rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One whole tensor as the engine's loader sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A key of `DTYPE_BYTES`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_stack(self) -> bool:
        """Whether it holds a matrix of every expert."""
        return len(self.shape) == 3

    @property
    def unstacked(self) -> tuple[str, ...]:
        """Names in a checkpoint: of each expert's matrix for a stack, else the tensor's own name."""
        return tuple(of_expert(self.name, expert) for expert in range(self.shape[0])) if self.is_stack else (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Coordinates of a rectangular region of a tensor."""

    start: tuple[int, ...]
    """First index in each dimension."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def expert(self) -> int:
        """Expert of the matrix of a stack in which the box begins; 0 in any other tensor."""
        return self.start[0] if len(self.start) == 3 else 0

    @property
    def in_matrix(self) -> "Box":
        """The same box in the coordinates of one expert's matrix; the box itself in any other tensor."""
        return Box(start=self.start[-2:], shape=self.shape[-2:])

    def common(self, other: "Box") -> "Box":
        """The intersection; a dimension of its shape is 0 if there is none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        shape = tuple(
            max(0, min(a + n, b + m) - first)
            for a, n, b, m, first in zip(self.start, self.shape, other.start, other.shape, start, strict=True)
        )
        return Box(start=start, shape=shape)

    def holds(self, other: "Box") -> bool:
        """Whether another box, which is not empty, lies inside."""
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """The box as an index into a tensor that begins at `origin` of this one."""
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(self.start, self.shape, origin, strict=True))


def overlap(boxes: Iterable[Box]) -> bool:
    """Whether any two boxes of one vector or matrix share an element; O(n log n), for plans of many ranks."""
    begins, ends = 1, 0
    events = []
    for box in boxes:
        if box.size:
            # a vector is a matrix of one row
            (top, left), (height, width) = (0, *box.start)[-2:], (1, *box.shape)[-2:]
            span = left, left + width
            events += [(top, begins, span), (top + height, ends, span)]
    events.sort()
    open_spans: list[tuple[int, int]] = []
    for _, kind, span in events:
        place = bisect_left(open_spans, span)
        if kind == ends:
            del open_spans[place]
        elif (place and open_spans[place - 1][1] > span[0]) or (
            place < len(open_spans) and open_spans[place][0] < span[1]
        ):
            return True
        else:
            open_spans.insert(place, span)
    return False


Required = Mapping[str, tuple[Box, ...]]
"""Boxes of each tensor that one engine rank requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor, stored row-major and contiguous inside a bucket."""

    tensor: int
    """Index into `WeightManifest.tensors`."""
    start: tuple[int, ...]
    """First index of the box in each dimension."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket; a multiple of `PIECE_ALIGNMENT`."""

    @property
    def box(self) -> Box:
        """Coordinates of the piece in its tensor."""
        return Box(start=self.start, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One unit of weight transfer."""

    index: int
    source_rank: int
    """Trainer rank that fills and sends it."""
    num_bytes: int
    """Payload and trailer together."""
    pieces: tuple[Piece, ...]
    engine_ranks: tuple[int, ...] = ()
    """Ranks of each engine that require it; () for all."""

    def required_by(self, engine_rank: int) -> bool:
        """Whether a rank of an engine requires this bucket."""
        return not self.engine_ranks or engine_rank in self.engine_ranks

    @property
    def payload_bytes(self) -> int:
        """Bytes before the trailer."""
        return self.num_bytes - TRAILER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Names, shapes, dtypes and pieces of every tensor of one publish."""

    run_id: str
    weight_version: WeightVersion
    format: str
    """`bf16`, `int8`, `fp8_channel` or `fp8_block`."""
    tensors: tuple[TensorSpec, ...]
    """In the order in which the engine's loader gets them: layer by layer."""
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def of_version(self, weight_version: WeightVersion) -> "WeightManifest":
        """The manifest of another publish by the same plan."""
        return replace(self, weight_version=weight_version)

    def follows_plan_of(self, other: "WeightManifest") -> bool:
        """Whether the two differ in their version at most. Fast if they share tensors and buckets, as of one plan."""
        return self.of_version(other.weight_version) == other

    def check(self) -> None:
        """Raise `RuntimeError` naming the first tensor or bucket that breaks an invariant."""
        covered = [0] * len(self.tensors)
        boxes: dict[tuple[int, int], list[Box]] = {}
        for expected, bucket in enumerate(self.buckets):
            if bucket.index != expected:
                raise RuntimeError(f"bucket {expected} of the manifest is numbered {bucket.index}")
            end = 0
            for piece in sorted(bucket.pieces, key=lambda p: p.offset):
                if piece.offset < end or piece.offset % PIECE_ALIGNMENT:
                    raise RuntimeError(f"bucket {bucket.index}: piece at byte {piece.offset} overlaps or is unaligned")
                spec = self.tensors[piece.tensor]
                if len(piece.start) != len(spec.shape) or any(
                    lo < 0 or lo + n > full for lo, n, full in zip(piece.start, piece.shape, spec.shape, strict=True)
                ):
                    raise RuntimeError(f"{spec.name}: box {piece.start}+{piece.shape} is outside {spec.shape}")
                if spec.is_stack and piece.shape[0] != 1:
                    raise RuntimeError(f"{spec.name}: box {piece.start}+{piece.shape} is of several experts")
                end = piece.offset + math.prod(piece.shape) * DTYPE_BYTES[spec.dtype]
                covered[piece.tensor] += math.prod(piece.shape)
                boxes.setdefault((piece.tensor, piece.box.expert), []).append(piece.box)
            if end > bucket.payload_bytes:
                raise RuntimeError(f"bucket {bucket.index}: pieces end at {end}, payload at {bucket.payload_bytes}")
        for spec, count in zip(self.tensors, covered, strict=True):
            if count != math.prod(spec.shape):
                raise RuntimeError(f"{spec.name}: pieces cover {count} of {math.prod(spec.shape)} elements")
        for (tensor, _), of_matrix in boxes.items():
            if overlap(of_matrix):
                raise RuntimeError(f"{self.tensors[tensor].name}: pieces overlap")

    def check_required(self, engine_rank: int, required: Required) -> None:
        """Raise `RuntimeError` naming the first tensor with a required box that the rank would not receive."""
        sent: dict[tuple[str, int], list[Box]] = {}
        for bucket in self.buckets:
            if bucket.required_by(engine_rank):
                for piece in bucket.pieces:
                    sent.setdefault((self.tensors[piece.tensor].name, piece.box.expert), []).append(piece.box)
        for name, boxes in required.items():
            for box in boxes:
                size = sum(box.common(other).size for other in sent.get((name, box.expert), []))
                if size != box.size:
                    raise RuntimeError(
                        f"{name}: engine rank {engine_rank} would get {size} of the {box.size} elements it requires"
                    )
