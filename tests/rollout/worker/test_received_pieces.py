"""Boxes of tensors are assembled from the buckets that one rank received, held no longer than needed."""

import pytest
import torch

from rollout.types import WeightVersion
from rollout.weights.manifest import TRAILER, Box, Bucket, Piece, TensorSpec, WeightManifest
from rollout.worker.received_pieces import ReceivedPieces

MATRIX = torch.arange(24, dtype=torch.float32).view(4, 6)
BIAS = torch.arange(4, dtype=torch.float32)


class Buckets:
    """An inbox that records the buckets taken."""

    def __init__(self, payloads: dict[int, bytes]) -> None:
        self.payloads, self.taken = payloads, []

    def take(self, bucket: Bucket) -> torch.Tensor:
        self.taken.append(bucket.index)
        content = bytearray(self.payloads[bucket.index]) + bytearray(TRAILER.size)
        return torch.frombuffer(content, dtype=torch.uint8)


def publish(cuts: list[tuple[Box, tuple[int, ...]]]) -> tuple[WeightManifest, Buckets]:
    """The matrix cut into one bucket per box, and the bias in a bucket for all ranks."""
    boxes = [(0, MATRIX, box, ranks) for box, ranks in cuts] + [(1, BIAS, Box(start=(0,), shape=(4,)), ())]
    payloads = {}
    buckets = []
    for index, (number, tensor, box, ranks) in enumerate(boxes):
        data = tensor[box.slices((0,) * tensor.dim())].contiguous().numpy().tobytes()
        payloads[index] = data
        piece = Piece(tensor=number, start=box.start, shape=box.shape, offset=0)
        size = len(data) + TRAILER.size
        buckets.append(Bucket(index=index, source_rank=0, num_bytes=size, pieces=(piece,), engine_ranks=ranks))
    manifest = WeightManifest(
        run_id="run",
        weight_version=WeightVersion(0),
        format="bf16",
        tensors=(
            TensorSpec(name="matrix", shape=(4, 6), dtype="float32"),
            TensorSpec(name="bias", shape=(4,), dtype="float32"),
        ),
        buckets=tuple(buckets),
    )
    manifest.check()
    return manifest, Buckets(payloads)


LEFT, RIGHT = Box(start=(0, 0), shape=(4, 3)), Box(start=(0, 3), shape=(4, 3))


def test_a_rank_receives_only_its_own_buckets() -> None:
    manifest, inbox = publish([(LEFT, (0,)), (RIGHT, (1,))])
    received = ReceivedPieces(manifest, inbox, engine_rank=1)
    assert torch.equal(received.read("matrix", RIGHT), MATRIX[:, 3:])
    assert inbox.taken == [1]
    with pytest.raises(RuntimeError, match="matrix: this rank received 0 of the 12 elements"):
        received.read("matrix", LEFT)


def test_a_box_is_assembled_from_pieces_that_overlap_it() -> None:
    manifest, inbox = publish([(LEFT, ()), (RIGHT, ())])
    middle = Box(start=(1, 2), shape=(2, 3))
    assert torch.equal(ReceivedPieces(manifest, inbox, engine_rank=0).read("matrix", middle), MATRIX[1:3, 2:5])


def test_a_box_that_is_not_covered_is_refused_before_anything_is_loaded() -> None:
    manifest, _ = publish([(LEFT, (0,)), (RIGHT, (1,))])
    whole = Box(start=(0, 0), shape=(4, 6))
    manifest.check_required(0, {"matrix": (LEFT,), "bias": (Box(start=(1,), shape=(2,)),)})
    with pytest.raises(RuntimeError, match="matrix: engine rank 0 would get 12 of the 24 elements"):
        manifest.check_required(0, {"matrix": (whole,)})
    with pytest.raises(RuntimeError, match="scale: engine rank 0 would get 0 of the 1"):
        manifest.check_required(0, {"scale": (Box(start=(0,), shape=(1,)),)})


def test_buckets_are_released_when_all_of_them_was_read_and_vectors_may_be_loaded_again() -> None:
    manifest, inbox = publish([(LEFT, ()), (RIGHT, ())])
    received = ReceivedPieces(manifest, inbox, engine_rank=0)
    bias = Box(start=(0,), shape=(4,))
    for _ in range(2):
        assert torch.equal(received.read("bias", bias), BIAS)
    assert torch.equal(received.read("matrix", LEFT), MATRIX[:, :3])
    assert inbox.taken == [2, 0] and not received._held
    with pytest.raises(RuntimeError, match="bucket 0 was read completely"):
        received.read("matrix", LEFT)


def test_an_empty_box_gives_an_empty_part() -> None:
    manifest, inbox = publish([(LEFT, ()), (RIGHT, ())])
    assert ReceivedPieces(manifest, inbox, engine_rank=0).read("matrix", Box(start=(4, 0), shape=(0, 6))).shape == (
        0,
        6,
    )
