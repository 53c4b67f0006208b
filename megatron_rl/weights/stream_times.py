"""Seconds that the parts of a publish take where the weights lie, without a wait for the device.

A call that starts a kernel on a device returns before the kernel runs, so a clock around the call reads too little.
CUDA events lie in the device's stream between the kernels. Their times are read once all parts have been started.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamTimes:
    """Adds up the seconds of named parts; each part may come many times, also inside another part."""

    def __init__(self, *, on_device: bool) -> None:
        """`on_device`: parts run on the current CUDA stream, else in this thread."""
        self._on_device = on_device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        """Part, and the events around it that have not been read."""

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the body to a part."""
        if self._on_device:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._events.append((part, first, last))
            return
        started = time.perf_counter()
        yield
        self._add(part, time.perf_counter() - started)

    def seconds(self, part: str) -> float:
        """Seconds of a part so far. On a device it waits for what was measured; senders have waited for it before."""
        for name, first, last in self._events:
            last.synchronize()
            self._add(name, first.elapsed_time(last) / 1000)
        self._events.clear()
        return self._seconds.get(part, 0.0)

    def _add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds
