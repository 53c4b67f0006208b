"""Times of work that runs later than its call returns, over a stand-in for a stream and its events."""

import pytest
import torch

from megatron_rl.weights import packer, stream_times
from megatron_rl.weights.reshard_plan import Role
from megatron_rl.weights.stream_times import StreamTimes
from tests.megatron_rl.weights.test_packer_fp8 import Published


class Stream:
    """Kernels run one after another on a clock of their own; starting one takes no time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_waits = 0

    def run(self, seconds: float) -> None:
        self.now_s += seconds

    def event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing, "CUDA gives no time of other events"
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at_s = stream, 0.0

    def record(self) -> None:
        self.at_s = self.stream.now_s

    def synchronize(self) -> None:
        self.stream.num_waits += 1

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.at_s - self.at_s)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


def test_kernels_count_where_they_run_and_nothing_is_waited_for_before_a_time_is_read(stream: Stream) -> None:
    times = StreamTimes(on_device=True)
    for _ in range(3):
        with times.measure("pack"):
            stream.run(1.0)
            with times.measure("sums"):
                stream.run(0.25)
        stream.run(5.0)  # checksums
    assert stream.num_waits == 0
    assert (times.seconds("pack"), times.seconds("sums"), times.seconds("other")) == (3.75, 0.75, 0.0)
    assert times.seconds("sums") == 0.75, "a time is counted once"


def test_without_a_device_the_clock_of_the_thread_counts(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_times.time, "perf_counter", lambda: stream.now_s)
    times = StreamTimes(on_device=False)
    for seconds in (1.0, 0.5):
        with times.measure("sums"):
            stream.run(seconds)
    assert (times.seconds("sums"), stream.num_waits) == (1.5, 0)


def test_a_packer_counts_the_kernels_of_sums_though_their_calls_return_at_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Published("int8")
    monkeypatch.setattr(packer, "StreamTimes", lambda *, on_device: StreamTimes(on_device=True))
    products_of = packer.products_of

    def slow(*args: object) -> torch.Tensor:
        stream.run(100.0)
        return products_of(*args)

    monkeypatch.setattr(packer, "products_of", slow)
    published.send()
    num_pieces = sum(piece.role is not Role.SCALES for pieces in published.plan.pieces for piece in pieces)
    assert published.packer.sums_s >= 100.0 * num_pieces > 0
    assert published.packer.pack_s == published.packer.sums_s, "all other kernels of the stand-in take no time"
