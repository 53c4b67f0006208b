"""A shared region in the memory of a CUDA device, which another process on the same device maps without a copy.

An address is the pickled data that `torch.multiprocessing` would send to another process to rebuild a tensor there: a
CUDA IPC handle, offsets, and a reference counter in shared memory. Both processes may number their devices differently.
The reader maps the region on its own current device, which must be the same hardware device.
"""

import base64
import pickle

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rollout.types import WeightVersion

_DEVICE_ARGUMENT = 6
"""Position of the device number in the arguments of `rebuild_cuda_tensor`."""


class CudaRegion:
    """A region on the current device; satisfies `rollout.transports.colocated.SharedRegion`."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._memory: torch.Tensor | None = None

    def reserve(self, weight_version: WeightVersion, num_bytes: int) -> torch.Tensor:
        """Allocate memory on the device, uint8 [num_bytes]."""
        self.remove()
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._memory

    def show(self) -> str:
        """Wait until all writes are complete; returns the address."""
        assert self._memory is not None, "reserve() comes first"
        torch.cuda.synchronize(self.device)
        rebuild, arguments = reduce_tensor(self._memory)  # type: ignore[no-untyped-call]
        assert rebuild is rebuild_cuda_tensor, "CUDA memory is shared by a handle"
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return base64.b64encode(pickle.dumps((uuid, arguments))).decode()

    def remove(self) -> None:
        """Release the memory; it is freed once its readers have released it too."""
        if self._memory is not None:
            self._memory = None
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


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
