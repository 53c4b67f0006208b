"""The thread that receives buckets while another one reads them."""

import threading
from types import SimpleNamespace

import pytest
import torch

from rollout.transports.prefetch import Prefetch
from rollout.worker.receiver import BucketReceiver


class Source:
    """Gives one payload for every bucket."""

    received_bytes = 0

    def __init__(self, payload: object) -> None:
        self._payload = payload

    def take(self, bucket: object) -> object:
        return self._payload


def buckets(count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(index=number) for number in range(count)]


def test_memory_of_a_bucket_is_kept_until_the_readers_stream_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator knows the stream of the thread that allocated only."""
    recorded: list[object] = []
    payload = SimpleNamespace(is_cuda=True, device="cuda:1", record_stream=recorded.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (threading.current_thread().name, device))
    (bucket,) = buckets(1)
    assert Prefetch(Source(payload), [bucket]).take(bucket) is payload
    assert recorded == [(threading.current_thread().name, "cuda:1")]


def test_a_discarded_update_ends_the_thread_that_holds_a_bucket() -> None:
    receiver = BucketReceiver.__new__(BucketReceiver)
    receiver.model = torch.nn.Module()
    prefetch = receiver._inbox = Prefetch(Source(torch.empty(4)), buckets(3))
    receiver.finish_weight_update = lambda: setattr(receiver, "_inbox", None)  # type: ignore[method-assign]
    receiver.discard()
    prefetch._thread.join(2)
    assert not prefetch._thread.is_alive()
