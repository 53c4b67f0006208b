"""What has changed in a bucket since the last publish, in as few bytes as two simple codes need.

After a small optimizer step most 8-bit codes are what they were. A sender and its receivers keep the last bytes of each
bucket; what travels is either

* *gaps*: for each byte that changed, how many unchanged ones lie before it (255: as many, and go on), and its new
  value; two bytes a change, or
* *bitmap*: a bit for each byte, then the new values; an eighth of the payload and one byte a change,

whichever is shorter, and the whole payload where neither saves an eighth. The checksum in the trailer is the new
payload's, so a delta on a wrong baseline is found out before anything is loaded.

Pure byte work in torch, on whatever device the bytes lie. Shape legend: L bytes of payload, C changed bytes.
"""

import enum
import struct
from dataclasses import dataclass

import torch

HEADER = struct.Struct("<BBxxxxxxqqq")
"""Kind, whether to keep the bucket as a baseline, weight version of the baseline, bytes that follow, changed bytes."""

_ESCAPE = 255
_WORTHWHILE = 0.875
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class Kind(enum.IntEnum):
    """What follows a header."""

    WHOLE = 0
    GAPS = 1
    BITMAP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A bucket on its way."""

    kind: Kind
    body: torch.Tensor
    """uint8"""
    num_changed: int
    """Bytes; all of them for a whole bucket."""

    def header(self, base_version: int, *, keep: bool) -> bytes:
        """What goes ahead; `base_version` is that of the baseline, -1 for a whole bucket."""
        return HEADER.pack(self.kind, keep, base_version, self.body.numel(), self.num_changed)


def encode(baseline_L: torch.Tensor, payload_L: torch.Tensor) -> Message:
    """The shortest message that makes `payload_L` of `baseline_L` (uint8)."""
    changed_L = baseline_L != payload_L
    places_C = changed_L.nonzero().view(-1)
    num_changed, length = places_C.numel(), payload_L.numel()
    gaps_C = torch.diff(places_C, prepend=places_C.new_full((1,), -1)) - 1
    gap_bytes = 2 * num_changed + int((gaps_C // _ESCAPE).sum())
    bitmap_bytes = -(-length // 8) + num_changed
    if min(gap_bytes, bitmap_bytes) > _WORTHWHILE * length:
        return Message(kind=Kind.WHOLE, body=payload_L, num_changed=length)
    values_C = payload_L[places_C]
    if gap_bytes <= bitmap_bytes:
        return Message(kind=Kind.GAPS, body=torch.cat([_gap_bytes(gaps_C), values_C]), num_changed=num_changed)
    return Message(kind=Kind.BITMAP, body=torch.cat([_packed(changed_L), values_C]), num_changed=num_changed)


def apply(message: Message, baseline_L: torch.Tensor) -> torch.Tensor:
    """The payload that `encode` was given, uint8 [L], in memory of its own.

    Raises:
        RuntimeError: the message does not fit a baseline of this length.
    """
    if message.kind is Kind.WHOLE:
        return message.body
    split = message.body.numel() - message.num_changed
    where, values_C = message.body[:split], message.body[split:]
    length = baseline_L.numel()
    places_C = _places(where) if message.kind is Kind.GAPS else _unpacked(where, length).nonzero().view(-1)
    if places_C.numel() != values_C.numel() or (places_C.numel() and int(places_C[-1]) >= length):
        raise RuntimeError(
            f"a delta of {message.num_changed} changed bytes names {places_C.numel()} places in a bucket of {length}"
        )
    payload_L = baseline_L.clone()
    payload_L[places_C] = values_C
    return payload_L


def _gap_bytes(gaps_C: torch.Tensor) -> torch.Tensor:
    """Each gap as escapes and a rest, uint8."""
    ends_C = (gaps_C // _ESCAPE + 1).cumsum(0)
    size = int(ends_C[-1]) if ends_C.numel() else 0
    found = gaps_C.new_full((size,), _ESCAPE, dtype=torch.uint8)
    found[ends_C - 1] = (gaps_C % _ESCAPE).to(torch.uint8)
    return found


def _places(gap_bytes: torch.Tensor) -> torch.Tensor:
    """Where the changed bytes are, int64 [C]."""
    is_last = gap_bytes != _ESCAPE
    # an escape stands for 255 bytes and no change, a rest for so many bytes and the changed one after them
    after = (gap_bytes.to(torch.int64) + is_last).cumsum(0)
    return after[is_last] - 1


def _packed(changed_L: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(changed_L.to(torch.uint8), (0, -len(changed_L) % 8)).view(-1, 8)
    return (padded * padded.new_tensor(_BITS)).sum(dim=1, dtype=torch.int64).to(torch.uint8)


def _unpacked(bitmap: torch.Tensor, length: int) -> torch.Tensor:
    if bitmap.numel() != -(-length // 8):
        raise RuntimeError(f"a bitmap of {bitmap.numel()} bytes came for a bucket of {length} bytes")
    bits = bitmap.unsqueeze(1) & bitmap.new_tensor(_BITS)
    return (bits != 0).view(-1)[:length]
