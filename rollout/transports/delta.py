"""Encodes the bytes of a bucket that changed since the last publish, by the shorter of two simple codes.

After a small optimizer step most 8-bit codes are unchanged. A sender and its receivers keep the last bytes of each
bucket. A message contains either

* *gaps*: for each changed byte, the number of unchanged bytes before it (255 means: as many, and continue), and the new
  value; two bytes a change, or
* *bitmap*: a bit for each byte, then the new values; an eighth of the payload and one byte a change,

whichever is shorter, or the whole payload if neither saves an eighth. The checksum in the trailer is that of the new
payload, so a delta on a wrong baseline is detected before its bucket is loaded.

Pure byte work on the device that holds the bytes: torch, and numpy on a CPU where numpy is faster.

Shape legend: L bytes of payload, C changed bytes.
"""

import enum
import struct
from dataclasses import dataclass

import numpy as np
import torch

HEADER = struct.Struct("<BBxxxxxxqqq")
"""Kind, whether to keep the bucket as a baseline, weight version of the baseline, bytes of the body, changed bytes."""

_ESCAPE = 255
_WORTHWHILE = 0.875
_WORD = 8
"""Bytes that are compared at a time if few have changed."""
_FEW_WORDS = 0.125
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class Kind(enum.IntEnum):
    """Content of a message's body."""

    WHOLE = 0
    GAPS = 1
    BITMAP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An encoded bucket."""

    kind: Kind
    body: torch.Tensor
    """uint8"""
    num_changed: int
    """Number of changed bytes; all bytes for a whole bucket."""

    def header(self, base_version: int, *, keep: bool) -> bytes:
        """The message's header; `base_version` is the weight version of the baseline, -1 for a whole bucket."""
        return HEADER.pack(self.kind, keep, base_version, self.body.numel(), self.num_changed)


def encode(baseline_L: torch.Tensor, payload_L: torch.Tensor) -> Message:
    """The shortest message that turns `baseline_L` into `payload_L`, uint8; both start at 8-byte words in storage."""
    length = payload_L.numel()
    places_C = _changed(baseline_L, payload_L)
    if places_C is None:
        return Message(kind=Kind.WHOLE, body=payload_L, num_changed=length)
    num_changed = places_C.numel()
    gaps_C = torch.diff(places_C, prepend=places_C.new_full((1,), -1)) - 1
    long_G = (gaps_C >= _ESCAPE).nonzero().view(-1)
    escapes_G = gaps_C[long_G] // _ESCAPE
    gap_bytes = 2 * num_changed + int(escapes_G.sum())
    bitmap_bytes = -(-length // 8) + num_changed
    if min(gap_bytes, bitmap_bytes) > _WORTHWHILE * length:
        return Message(kind=Kind.WHOLE, body=payload_L, num_changed=length)
    values_C = payload_L[places_C]
    if gap_bytes <= bitmap_bytes:
        body = torch.cat([_gap_bytes(gaps_C, long_G, escapes_G), values_C])
        return Message(kind=Kind.GAPS, body=body, num_changed=num_changed)
    body = torch.cat([_packed(baseline_L != payload_L), values_C])
    return Message(kind=Kind.BITMAP, body=body, num_changed=num_changed)


def _changed(baseline_L: torch.Tensor, payload_L: torch.Tensor) -> torch.Tensor | None:
    """Ascending indices of the bytes that differ, int64 [C]; None if they are too many for either code."""
    whole = payload_L.numel() // _WORD * _WORD
    before, after = (bytes_L[:whole].view(torch.int64) for bytes_L in (baseline_L, payload_L))
    words = _places_of(before != after)
    if words.numel() > _FEW_WORDS * before.numel():
        changed_L = baseline_L != payload_L
        return None if _count(changed_L) > (_WORTHWHILE - 1 / 8) * payload_L.numel() else _places_of(changed_L)
    # few changed: compare words, then only the bytes of changed words
    within = _places_of(before[words].view(torch.uint8) != after[words].view(torch.uint8))
    ends = _places_of(baseline_L[whole:] != payload_L[whole:]) + whole
    return torch.cat([words[within // _WORD] * _WORD + within % _WORD, ends])


def apply(message: Message, baseline_L: torch.Tensor) -> torch.Tensor:
    """Restore the payload of `encode`, uint8 [L], in new memory unless the message is whole.

    Raises:
        RuntimeError: the message does not fit a baseline of this length.
    """
    if message.kind is Kind.WHOLE:
        return message.body
    split = message.body.numel() - message.num_changed
    where, values_C = message.body[:split], message.body[split:]
    length = baseline_L.numel()
    places_C = _places(where) if message.kind is Kind.GAPS else _places_of(_unpacked(where, length))
    if places_C.numel() != values_C.numel() or (places_C.numel() and int(places_C[-1]) >= length):
        raise RuntimeError(
            f"a delta of {message.num_changed} changed bytes names {places_C.numel()} places in a bucket of {length}"
        )
    payload_L = baseline_L.clone()
    payload_L[places_C] = values_C
    return payload_L


def _gap_bytes(gaps_C: torch.Tensor, long_G: torch.Tensor, escapes_G: torch.Tensor) -> torch.Tensor:
    """Each gap as escapes and a remainder, uint8; gap `long_G[i]` has `escapes_G[i]` escapes."""
    rests_C = gaps_C.to(torch.uint8)
    if not long_G.numel():
        return rests_C
    rests_C[long_G] = (gaps_C[long_G] % _ESCAPE).to(torch.uint8)
    # the n-th escape comes before the remainder of its gap and after n other escapes
    owners = long_G.repeat_interleave(escapes_G)
    is_rest = torch.ones(gaps_C.numel() + owners.numel(), dtype=torch.bool, device=gaps_C.device)
    is_rest[owners + torch.arange(owners.numel(), device=gaps_C.device)] = False
    encoded = rests_C.new_full(is_rest.shape, _ESCAPE)
    encoded[is_rest] = rests_C
    return encoded


def _places(gap_bytes: torch.Tensor) -> torch.Tensor:
    """Indices of the changed bytes, int64 [C]."""
    is_last = gap_bytes != _ESCAPE
    # an escape means 255 unchanged bytes; a remainder means as many unchanged bytes, then a changed byte
    after = (gap_bytes.to(torch.int64) + is_last).cumsum(0)
    return after[is_last] - 1


def _places_of(changed_L: torch.Tensor) -> torch.Tensor:
    """Indices at which a mask is set, int64 [C]."""
    if changed_L.is_cuda:
        return changed_L.nonzero().view(-1)
    return torch.from_numpy(np.flatnonzero(changed_L.numpy()))  # two to four times as fast as torch's


def _count(changed_L: torch.Tensor) -> int:
    return int(changed_L.count_nonzero()) if changed_L.is_cuda else int(np.count_nonzero(changed_L.numpy()))


def _packed(changed_L: torch.Tensor) -> torch.Tensor:
    if not changed_L.is_cuda:
        return torch.from_numpy(np.packbits(changed_L.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(changed_L.to(torch.uint8), (0, -len(changed_L) % 8)).view(-1, 8)
    return (padded * padded.new_tensor(_BITS)).sum(dim=1, dtype=torch.int64).to(torch.uint8)


def _unpacked(bitmap: torch.Tensor, length: int) -> torch.Tensor:
    if bitmap.numel() != -(-length // 8):
        raise RuntimeError(f"a bitmap of {bitmap.numel()} bytes came for a bucket of {length} bytes")
    if not bitmap.is_cuda:
        return torch.from_numpy(np.unpackbits(bitmap.numpy(), count=length, bitorder="little").view(np.bool_))
    bits = bitmap.unsqueeze(1) & bitmap.new_tensor(_BITS)
    return (bits != 0).view(-1)[:length]
