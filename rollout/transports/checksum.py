"""The trailer that proves a bucket complete, of the right publish and in its own place.

Checksums are computed where the bytes lie. On a CPU the checksum is xxh3-64. On a device it is a multilinear hash
(Carter and Wegman, 1979): each 32-bit word of the payload is multiplied by a fixed odd 64-bit number of its position,
and products are summed modulo 2**64. A sum has no order, so the whole hash is one parallel reduction. It always detects
one changed word, and misses any other fault with a probability of about 2**-32 (the multipliers are random, and words
have 32 bits, so top bits do not cancel).

Both ends of a transport hold buckets on the same kind of device.
"""

from functools import cache

import torch
import xxhash

from rollout.types import WeightVersion
from rollout.weights.manifest import MAGIC, TRAILER

_WORD_BYTES = 4
_ROW_WORDS = 4096
_ROWS_AT_A_TIME = 256
"""Rows hashed at a time, because products take twice the bytes of their words."""


def seal(bucket: torch.Tensor, weight_version: WeightVersion, *, run_id: str, index: int) -> None:
    """Write the trailer into the last `TRAILER.size` bytes of the filled bucket `index` of a run, uint8 [L]."""
    checksum = _checksum(bucket[: -TRAILER.size], f"{run_id}/{index}")
    trailer = TRAILER.pack(MAGIC, weight_version, checksum)
    bucket[-TRAILER.size :].copy_(torch.frombuffer(bytearray(trailer), dtype=torch.uint8))


def verify(bucket: torch.Tensor, weight_version: WeightVersion, *, run_id: str, index: int) -> None:
    """Check a received bucket, uint8 [L], against its trailer.

    Raises:
        RuntimeError: the trailer is missing or of another publish, or the payload is corrupt.
    """
    magic, version, checksum = TRAILER.unpack(bucket[-TRAILER.size :].cpu().numpy().tobytes())
    if magic != MAGIC:
        raise RuntimeError(f"bucket {index}: no trailer where the manifest puts one")
    if version != weight_version:
        raise RuntimeError(f"bucket {index}: carries weight version {version}, the manifest says {weight_version}")
    if (actual := _checksum(bucket[: -TRAILER.size], f"{run_id}/{index}")) != checksum:
        raise RuntimeError(
            f"bucket {index}: checksum {actual:#x} of the received bytes, {checksum:#x} when sent; the bytes are "
            "corrupt, or those of another bucket or another run"
        )


def _checksum(payload: torch.Tensor, name: str) -> int:
    """Checksum of a payload and of the bucket's name, so that a bucket does not verify in another's place."""
    content = multilinear(payload) if payload.is_cuda else xxhash.xxh3_64_intdigest(payload.numpy().data)
    return content ^ xxhash.xxh3_64_intdigest(name.encode())


def multilinear(payload_L: torch.Tensor) -> int:
    """Checksum of uint8 [L] on any device; `payload_L` begins at a multiple of 4 bytes of its storage."""
    device = payload_L.device
    columns = _multipliers(device)
    whole = payload_L.numel() // _WORD_BYTES * _WORD_BYTES
    rest = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=device)
    rest[: payload_L.numel() - whole] = payload_L[whole:]
    words = payload_L[:whole].view(torch.int32)
    total = rest.view(torch.int32).long().sum() * columns[0] + payload_L.numel() * columns[1]
    full = words.numel() // _ROW_WORDS * _ROW_WORDS
    for first in range(0, full, _ROW_WORDS * _ROWS_AT_A_TIME):
        rows = words[first : min(first + _ROW_WORDS * _ROWS_AT_A_TIME, full)].view(-1, _ROW_WORDS)
        numbers = torch.arange(first // _ROW_WORDS, first // _ROW_WORDS + rows.shape[0], device=device)
        total = total + ((rows * columns).sum(1) * _of_row(numbers)).sum()
    tail = words[full:]
    total = total + (tail * columns[: tail.numel()]).sum() * _of_row(torch.tensor(full // _ROW_WORDS, device=device))
    return int(total) % (1 << 64)


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Odd multipliers, int64 [_ROW_WORDS]; equal on all machines, because torch's CPU generator is deterministic."""
    generator = torch.Generator().manual_seed(0x5EA1)
    low, high = (torch.randint(1 << 32, (_ROW_WORDS,), generator=generator) for _ in range(2))
    return (low | high << 32 | 1).to(device)


def _of_row(number: torch.Tensor) -> torch.Tensor:
    """Odd factor of a row of words by its number, int64; the finaliser of splitmix64 (Steele et al., 2014)."""
    mixed = (number + 1) * -0x61C8864680B583EB
    mixed = (mixed ^ _shifted(mixed, 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ _shifted(mixed, 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(number: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's shift is arithmetic."""
    return number >> bits & (1 << 64 - bits) - 1
