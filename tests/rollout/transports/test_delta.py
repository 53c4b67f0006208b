"""A delta turns the old payload into the new one, and has the length that it reports."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.transports.delta import HEADER, Kind, Message, apply, encode


def payloads(length: int, share: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two payloads that differ in about `share` of their bytes."""
    random = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=random)
    flips = torch.rand(length, generator=random) < share
    return before, torch.where(flips, before + 1, before)


@settings(deadline=None, max_examples=200)
@given(
    length=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 1000),
)
def test_a_delta_turns_the_old_payload_into_the_new_one(length: int, share: float, seed: int) -> None:
    before, after = payloads(length, share, seed)
    message = encode(before, after)
    assert torch.equal(apply(message, before), after)
    assert message.body.numel() <= length
    if message.kind is not Kind.WHOLE:
        assert message.num_changed == int((before != after).sum())


@pytest.mark.parametrize(
    ("share", "kind", "most"),
    [(0.0, Kind.GAPS, 0.0), (0.01, Kind.GAPS, 0.022), (0.1, Kind.GAPS, 0.205), (0.3, Kind.BITMAP, 0.43)],
)
def test_the_shorter_encoding_is_chosen(share: float, kind: Kind, most: float) -> None:
    before, after = payloads(200_000, share)
    message = encode(before, after)
    assert message.kind is kind
    assert message.body.numel() <= most * 200_000


def test_a_bucket_that_changed_everywhere_is_sent_whole() -> None:
    before, after = payloads(1000, 0.9)
    message = encode(before, after)
    assert message.kind is Kind.WHOLE and torch.equal(message.body, after)
    assert HEADER.unpack(message.header(-1, keep=True)) == (0, 1, -1, 1000, 1000)


def test_gaps_longer_than_a_byte_are_encoded() -> None:
    before = torch.zeros(2000, dtype=torch.uint8)
    for places in ([0], [254], [255], [256], [510], [1999], [0, 256, 512, 1999], [254, 510, 766]):
        after = before.clone()
        after[places] = 7
        assert torch.equal(apply(encode(before, after), before), after), places


def test_a_message_for_a_longer_bucket_is_refused() -> None:
    before, after = payloads(1000, 0.01)
    message = encode(before, after)
    with pytest.raises(RuntimeError, match="changed bytes"):
        apply(message, before[:100])
    with pytest.raises(RuntimeError, match="changed bytes"):
        apply(Message(kind=Kind.GAPS, body=message.body[1:], num_changed=message.num_changed), before)
    bits = encode(*payloads(1000, 0.3))
    with pytest.raises(RuntimeError, match="a bitmap of 125 bytes came for a bucket of 100 bytes"):
        apply(bits, before[:100])
