"""Replaces `torch.cuda` for Megatron-Core on machines without a CUDA device.

`megatron_rl.cpu.shim` compiles Megatron's sources so that `torch.cuda` in them means this module. The real `torch.cuda`
is unchanged, and no other package sees this module. Device queries answer "cpu", streams and events do nothing, and the
generator of the only device is torch's default generator. Everything else (types, exceptions, functions that Megatron
only mentions) comes from `torch.cuda`.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch


def is_available() -> bool:
    """False: capability checks inside Megatron take their CPU branch."""
    return False


def current_device() -> torch.device:
    """The CPU; CUDA returns a device number, and both are valid for `device=`."""
    return torch.device("cpu")


def device_count() -> int:
    """One device: the CPU."""
    return 1


def set_device(device: object) -> None:
    """Do nothing: there is only one."""


def synchronize(device: object = None) -> None:
    """Do nothing: CPU operations are complete when they return."""


def empty_cache() -> None:
    """Do nothing: there is no caching allocator."""


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
    """0: bytes on a CPU are not counted."""
    return 0


memory_reserved = memory_allocated
max_memory_allocated = memory_allocated


def get_megatron_rng_state(
    device: object = None,
    clone: bool = False,  # Megatron's name
    graph_safe: bool = False,
) -> torch.Tensor:
    """Replaces Megatron's `_get_cuda_rng_state`."""
    return torch.get_rng_state()


def set_megatron_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    """Replaces Megatron's `_set_cuda_rng_state`."""
    torch.set_rng_state(new_state)


def _lazy_call(call: Callable[[], None]) -> None:
    call()


def _lazy_init() -> None:
    pass


class Event:
    """An event that is always complete."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Do nothing: no operation is pending."""

    def wait(self, stream: object = None) -> None:
        """Do nothing: no operation is pending."""

    def synchronize(self) -> None:
        """Do nothing: no operation is pending."""

    def query(self) -> bool:
        """True: the event is complete."""
        return True


class Stream:
    """The only stream, in program order; also the context that `device(...)` and `stream(...)` return."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        """Do nothing: operations run in order."""

    def wait_event(self, event: object) -> None:
        """Do nothing: operations run in order."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return a complete event."""
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing: no operation is pending."""

    def query(self) -> bool:
        """True: no operation is pending."""
        return True


device = Stream


def stream(stream: object) -> Stream:
    """Context in which operations run in `stream`."""
    return Stream()


def current_stream(device: object = None) -> Stream:
    """The only stream."""
    return Stream()


default_stream = current_stream


def set_stream(stream: object) -> None:
    """Do nothing: there is only one."""


def __getattr__(name: str) -> object:
    return getattr(torch.cuda, name)
