"""What Megatron-Core sees in place of `torch.cuda` where there is no CUDA device.

`cpu_shim` compiles Megatron's sources so that the words `torch.cuda` in them mean this module; the real
`torch.cuda` is not touched, and nobody else sees this one. Device queries answer "cpu", streams and
events are empty, the generator of the one device is torch's default generator; everything else (types,
exceptions, functions that Megatron only mentions) is torch's own.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch


def is_available() -> bool:
    """False: capability checks inside Megatron take their CPU branch."""
    return False


def current_device() -> torch.device:
    """The CPU, where CUDA would give a device number; both are good for `device=`."""
    return torch.device("cpu")


def device_count() -> int:
    """One device: the CPU."""
    return 1


def set_device(device: object) -> None:
    """Nothing to choose between."""


def synchronize(device: object = None) -> None:
    """CPU operations are finished when they return."""


def empty_cache() -> None:
    """There is no caching allocator."""


def get_rng_state(device: object = None) -> torch.Tensor:
    """State of torch's default generator."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    """Set the state of torch's default generator."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed torch's default generator."""
    torch.manual_seed(seed)


def memory_allocated(device: object = None) -> int:
    """Bytes on the device; the CPU does not count them."""
    return 0


memory_reserved = memory_allocated
max_memory_allocated = memory_allocated


def get_megatron_rng_state(
    device: object = None,
    clone: bool = False,  # Megatron calls it so
    graph_safe: bool = False,
) -> torch.Tensor:
    """Stands for Megatron's `_get_cuda_rng_state`."""
    return torch.get_rng_state()


def set_megatron_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    """Stands for Megatron's `_set_cuda_rng_state`."""
    torch.set_rng_state(new_state)


def _lazy_call(call: Callable[[], None]) -> None:
    call()


def _lazy_init() -> None:
    pass


class Event:
    """An event that has always happened."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Nothing is pending."""

    def wait(self, stream: object = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always complete."""
        return True


class Stream:
    """The one order in which CPU operations run; also what `device(...)` and `stream(...)` give."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        """Operations are in order already."""

    def wait_event(self, event: object) -> None:
        """Operations are in order already."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always idle."""
        return True


device = Stream


def stream(stream: object) -> Stream:
    """Context in which operations run in `stream`."""
    return Stream()


def current_stream(device: object = None) -> Stream:
    """The one stream."""
    return Stream()


default_stream = current_stream


def set_stream(stream: object) -> None:
    """Nothing to choose between."""


def __getattr__(name: str) -> object:
    return getattr(torch.cuda, name)
