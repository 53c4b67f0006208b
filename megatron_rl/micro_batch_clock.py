"""Seconds of each micro batch's forward and backward, taken where they are one after the other.

Without a pipeline a micro batch's backward ends before the next one's forward begins, so the time from forward to
forward is a micro batch's own. (In a pipeline passes of different micro batches interleave; nothing is timed there.)
The last one of an optimizer step is left out: gradients are reduced over ranks within it. On CUDA events are recorded
in the stream, and nobody waits for them before the step is over.
"""

import time
from itertools import pairwise

import torch


class MicroBatchClock:
    """Of one optimizer step."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def begin(self) -> None:
        """A micro batch's forward is about to begin."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of every micro batch but the last, in order."""
        if self._events:
            self._events[-1].synchronize()
        milliseconds = [before.elapsed_time(after) for before, after in pairwise(self._events)]
        on_host = [after - before for before, after in pairwise(self._times)]
        return [value / 1000 for value in milliseconds] if self._on_cuda else on_host
