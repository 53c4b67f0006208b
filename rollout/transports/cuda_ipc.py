"""A shared region in the memory of a CUDA device, which other processes on the same device map without a copy.

An address is the pickled data that `torch.multiprocessing` would send to another process to rebuild a tensor there: a
CUDA IPC handle, offsets, and a reference counter in shared memory. Processes may number their devices differently. A
reader maps the region on its own current device, which must be the same hardware device.

Torch frees shared memory when its counter is 0. The counter begins at 1, and the one reader that torch expects counts
it down. But engines on one device share an address, and an engine may die before it counts. The counter would miss 0,
and the memory would never be free again. So no reader counts: the owner does, when it removes the region after all have
read it.
"""

import base64
import pickle

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rollout.types import WeightVersion

_DEVICE_ARGUMENT = 6
"""Position of the device number in the arguments of `rebuild_cuda_tensor`."""
_COUNTER_ARGUMENT = 11
"""Position of the name of the counter's file; the counter's place in that file follows."""
_NO_COUNTER = b"/mrl-readers-do-not-count"
"""Name of no file. Torch ignores that a reader cannot count there, as it does after the death of a region's owner."""


class CudaRegion:
    """A region on the current device; satisfies `rollout.transports.colocated.SharedRegion`."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._memory: torch.Tensor | None = None
        self._counter: tuple[bytes, int] | None = None
        """File and place of torch's counter; None before `show`."""

    def reserve(self, weight_version: WeightVersion, num_bytes: int) -> torch.Tensor:
        """Allocate memory on the device, uint8 [num_bytes]."""
        self.remove()
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._memory

    def show(self) -> str:
        """Wait until all writes are complete; returns the address, for any number of readers. Call it once."""
        assert self._memory is not None and self._counter is None, "reserve() comes before each show()"
        torch.cuda.synchronize(self.device)
        rebuild, arguments = reduce_tensor(self._memory)  # type: ignore[no-untyped-call]
        assert rebuild is rebuild_cuda_tensor, "CUDA memory is shared by a handle"
        name, place = arguments[_COUNTER_ARGUMENT : _COUNTER_ARGUMENT + 2]
        self._counter = name, place
        shown = (*arguments[:_COUNTER_ARGUMENT], _NO_COUNTER, *arguments[_COUNTER_ARGUMENT + 1 :])
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return base64.b64encode(pickle.dumps((uuid, shown))).decode()

    def remove(self) -> None:
        """Free the memory, which no process reads any more, and give all that torch has cached back to the device.

        Engines on the device may need that memory next. They are other processes and cannot use what torch keeps.
        """
        if self._memory is None:
            return
        if self._counter is not None:
            torch.UntypedStorage._release_ipc_counter_cuda(*self._counter)
        self._memory = self._counter = None
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def map_cuda(address: str) -> torch.Tensor:
    """The memory of a `CudaRegion` of another process, uint8, on the current device.

    Raises:
        RuntimeError: the memory lies on another device than this process uses.
    """
    uuid, arguments = pickle.loads(base64.b64decode(address))
    here = torch.cuda.current_device()
    local = str(torch.cuda.get_device_properties(here).uuid)
    if uuid != local:
        raise RuntimeError(
            f"weights lie on device {uuid}, this engine rank is on {local}: CUDA IPC needs the trainer and engine "
            "rank of one number on one device; set publish.transport=shm"
        )
    changed = list(arguments)
    changed[_DEVICE_ARGUMENT] = here
    memory: torch.Tensor = rebuild_cuda_tensor(*changed)  # type: ignore[no-untyped-call]
    return memory
