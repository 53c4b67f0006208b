"""The wire format: a checksum verifies a bucket, `check` verifies a manifest."""

import dataclasses
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.transports.checksum import _multipliers, multilinear, seal, verify
from rollout.weights.manifest import TRAILER, Box, WeightManifest, of_expert, overlap, stack_of
from tests.support.engines.packing import pack


@given(payload=st.binary(min_size=0, max_size=300), version=st.integers(min_value=-1, max_value=1 << 40))
def test_a_sealed_bucket_verifies(payload, version):
    bucket = torch.frombuffer(bytearray(payload + bytes(TRAILER.size)), dtype=torch.uint8)
    seal(bucket, version, run_id="run", index=3)
    verify(bucket, version, run_id="run", index=3)
    assert bucket[: len(payload)].numpy().tobytes() == payload


@given(payload=st.binary(min_size=1, max_size=300), data=st.data())
def test_any_flipped_bit_is_detected(payload, data):
    bucket = torch.frombuffer(bytearray(payload + bytes(TRAILER.size)), dtype=torch.uint8)
    seal(bucket, 5, run_id="run", index=3)
    position = data.draw(st.integers(min_value=0, max_value=len(bucket) * 8 - 1))
    bucket[position // 8] ^= 1 << position % 8
    with pytest.raises(RuntimeError, match="bucket 3"):
        verify(bucket, 5, run_id="run", index=3)


@pytest.mark.parametrize(
    ("version", "run_id", "index", "message"),
    [
        (6, "run", 1, r"bucket 1: carries weight version 5, the manifest says 6"),
        (5, "run", 2, r"bucket 2: checksum .* those of another bucket"),
        (5, "other", 1, r"bucket 1: checksum .* another run"),
    ],
    ids=["publish", "bucket", "run"],
)
def test_a_bucket_in_the_place_of_another_is_refused(version, run_id, index, message):
    bucket = torch.zeros(100, dtype=torch.uint8)
    seal(bucket, 5, run_id="run", index=1)
    with pytest.raises(RuntimeError, match=message):
        verify(bucket, version, run_id=run_id, index=index)


def naive(payload: bytes) -> int:
    """The device's checksum, word by word in Python integers."""
    full = (1 << 64) - 1

    def of_row(number: int) -> int:
        mixed = (number + 1) * 0x9E3779B97F4A7C15 & full
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & full
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & full
        return (mixed ^ mixed >> 31) | 1

    columns = _multipliers(torch.device("cpu")).tolist()
    whole = len(payload) // 4 * 4
    words = [int.from_bytes(payload[at : at + 4], "little", signed=True) for at in range(0, whole, 4)]
    rest = int.from_bytes(payload[whole:], "little")
    total = rest * columns[0] + len(payload) * columns[1]
    for place, word in enumerate(words):
        total += word * columns[place % len(columns)] * of_row(place // len(columns))
    return total & full


@pytest.mark.parametrize("length", [0, 1, 4, 63, 4096 * 4, 4096 * 4 * 3 + 5])
def test_a_devices_checksum_equals_the_documented_sum(length):
    payload = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    assert multilinear(payload) == naive(payload.numpy().tobytes())


def test_a_devices_checksum_detects_flips_swaps_and_shifts():
    random = torch.Generator().manual_seed(0)
    payload = torch.randint(0, 256, (4096 * 4 * 2 + 100,), dtype=torch.uint8, generator=random)
    right = multilinear(payload)
    for _ in range(300):
        wrong = payload.clone()
        places = torch.randint(payload.numel(), (2,), generator=random)
        # two bits, the top ones of their words among them: a plain sum of 64-bit words would let those cancel
        wrong[places] ^= 1 << int(torch.randint(8, (1,), generator=random))
        if torch.equal(wrong, payload):
            continue
        assert multilinear(wrong) != right
    rows = payload[: 4096 * 8].view(2, -1)
    assert multilinear(torch.cat([rows[1], rows[0], payload[4096 * 8 :]])) != right
    assert multilinear(payload.roll(4)) != right
    assert multilinear(torch.cat([payload, torch.zeros(4, dtype=torch.uint8)])) != right


def manifest() -> WeightManifest:
    tensors = {"a": torch.zeros(8, 16), "b_o_proj": torch.zeros(4, 32), "c": torch.zeros(5)}
    return pack(tensors, 0, "bf16", num_ranks=2, bucket_bytes=512).manifest


def test_pieces_that_tile_every_tensor_pass():
    manifest().check()


def bucket_of_rank(found: WeightManifest, rank: int) -> int:
    return next(bucket.index for bucket in found.buckets if bucket.source_rank == rank)


def change_piece(found: WeightManifest, bucket: int, **changes: object) -> WeightManifest:
    buckets = list(found.buckets)
    pieces = list(buckets[bucket].pieces)
    pieces[0] = dataclasses.replace(pieces[0], **changes)
    buckets[bucket] = dataclasses.replace(buckets[bucket], pieces=tuple(pieces))
    return dataclasses.replace(found, buckets=tuple(buckets))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda m: change_piece(m, 0, offset=8), "unaligned"),
        (lambda m: change_piece(m, 0, start=(5, 0)), "outside"),
        (lambda m: change_piece(m, 0, shape=(1, 16)), "cover"),
        (lambda m: change_piece(m, bucket_of_rank(m, 1), start=(0, 0)), "overlap"),
        (lambda m: dataclasses.replace(m, buckets=m.buckets[::-1]), "numbered"),
        (lambda m: dataclasses.replace(m, buckets=m.buckets[:-1]), "cover"),
        (
            lambda m: dataclasses.replace(
                m, buckets=(dataclasses.replace(m.buckets[0], num_bytes=TRAILER.size), *m.buckets[1:])
            ),
            "payload",
        ),
    ],
)
def test_a_manifest_that_breaks_an_invariant_is_refused(broken, message):
    with pytest.raises(RuntimeError, match=message):
        broken(manifest()).check()


boxes_of_matrix = st.lists(
    st.tuples(*(st.tuples(st.integers(0, 6), st.integers(0, 4)) for _ in range(2))).map(
        lambda dims: Box(start=tuple(first for first, _ in dims), shape=tuple(size for _, size in dims))
    ),
    max_size=6,
)


@given(boxes_of_matrix)
def test_boxes_overlap_exactly_if_they_share_an_element(boxes):
    assert overlap(boxes) == any(a.common(b).size for a, b in combinations(boxes, 2))
    rows = [Box(start=box.start[:1], shape=box.shape[:1]) for box in boxes]
    assert overlap(rows) == any(a.common(b).size for a, b in combinations(rows, 2))


@given(boxes_of_matrix)
def test_a_box_contains_another_exactly_if_it_has_all_its_elements(boxes):
    for a, b in combinations([box for box in boxes if box.size], 2):
        assert a.holds(b) == (a.common(b).size == b.size)


def test_a_stack_of_experts_is_named_without_number_and_its_matrices_with_number():
    name = "model.layers.3.mlp.experts.17.up_proj.weight_scale"
    stack = "model.layers.3.mlp.experts.up_proj.weight_scale"
    assert stack_of(name) == stack_of(stack) == stack and of_expert(stack, 17) == name
    assert stack_of("model.layers.3.mlp.gate.weight") == "model.layers.3.mlp.gate.weight"
