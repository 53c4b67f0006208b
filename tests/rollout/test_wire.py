"""The wire format: trailers prove a bucket, `check` proves a manifest."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.wire import TRAILER, WeightManifest, seal, verify
from tests.rollout.packing import pack


@given(payload=st.binary(min_size=0, max_size=300), version=st.integers(min_value=-1, max_value=1 << 40))
def test_a_sealed_bucket_verifies(payload, version):
    bucket = memoryview(bytearray(payload + bytes(TRAILER.size)))
    seal(bucket, version)
    verify(bucket, version, index=3)
    assert bytes(bucket[: len(payload)]) == payload


@given(payload=st.binary(min_size=1, max_size=300), data=st.data())
def test_any_flipped_bit_is_found(payload, data):
    bucket = memoryview(bytearray(payload + bytes(TRAILER.size)))
    seal(bucket, 5)
    position = data.draw(st.integers(min_value=0, max_value=len(bucket) * 8 - 1))
    bucket[position // 8] ^= 1 << position % 8
    with pytest.raises(RuntimeError, match="bucket 3"):
        verify(bucket, 5, index=3)


def test_a_bucket_of_another_publish_is_refused_naming_both_versions():
    bucket = memoryview(bytearray(100))
    seal(bucket, 5)
    with pytest.raises(RuntimeError, match=r"version 5.*says 6"):
        verify(bucket, 6, index=0)


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
