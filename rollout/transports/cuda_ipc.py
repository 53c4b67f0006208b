"""A region in the memory of a CUDA device, which another process on the same device maps without a copy.

An address is what `torch.multiprocessing` would send to another process to rebuild a tensor there (a handle of CUDA
IPC, offsets, a counter of references in shared memory), pickled. Both processes may number their devices differently;
the reader maps it on its own current device, which has to be the same piece of hardware.
"""

import base64
import pickle

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rollout.types import WeightVersion

_DEVICE_ARGUMENT = 6
"""Of `rebuild_cuda_tensor`: the number of the device."""


class CudaRegion:
    """A region on the current device; satisfies `rollout.transports.colocated.SharedRegion`."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._memory: torch.Tensor | None = None

    def reserve(self, weight_version: WeightVersion, num_bytes: int) -> torch.Tensor:
        """Memory of the device, uint8 [num_bytes]."""
        self.remove()
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._memory

    def show(self) -> str:
        """Wait until all that was written is there; returns the address."""
        assert self._memory is not None, "reserve() comes first"
        torch.cuda.synchronize(self.device)
        rebuild, arguments = reduce_tensor(self._memory)  # type: ignore[no-untyped-call]
        assert rebuild is rebuild_cuda_tensor, "memory of a device is sent by a handle"
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return base64.b64encode(pickle.dumps((uuid, arguments))).decode()

    def remove(self) -> None:
        """Free the memory once its readers have let go of it too."""
        if self._memory is not None:
            self._memory = None
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def map_cuda(address: str) -> torch.Tensor:
    """The memory of a `CudaRegion` of another process, uint8, on the current device.

    Raises:
        RuntimeError: it lies on another device than this process uses.
    """
    uuid, arguments = pickle.loads(base64.b64decode(address))
    here = torch.cuda.current_device()
    own = str(torch.cuda.get_device_properties(here).uuid)
    if uuid != own:
        raise RuntimeError(
            f"weights lie on device {uuid}, this engine rank is on {own}: CUDA IPC needs trainer and engine ranks of "
            "one number on one device; set publish.transport=shm"
        )
    changed = list(arguments)
    changed[_DEVICE_ARGUMENT] = here
    memory: torch.Tensor = rebuild_cuda_tensor(*changed)  # type: ignore[no-untyped-call]
    return memory
