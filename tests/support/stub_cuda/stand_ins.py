"""Answers where host code reads what a kernel of a device would have computed. Each names its operation.

They are installed when a module is imported (`site/sitecustomize.py`), so that only the modules that need one have it.
Every process of a rehearsal imports this file, before torch.
"""

import os
from collections.abc import Callable
from types import ModuleType

TORCH_SHARES = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


def install(module: ModuleType) -> None:
    """Install the stand-ins that belong to a module, after its import."""
    INSTALLERS[module.__name__](module)


def _outputs(module: ModuleType) -> None:
    """vLLM selects rows by a mask on the device, whose number of rows a kernel counts."""
    import torch

    tensors = module.LogprobsTensors
    tensors.filter = lambda self, mask: tensors(*(part[torch.from_numpy(mask)] for part in self[:3]))


def _learner(module: ModuleType) -> None:
    """Lengths that a kernel would have computed are garbage; cuDNN's attention needs a real driver."""
    import torch
    import transformer_engine.pytorch as te

    reduce, repeat = torch.segment_reduce, torch.Tensor.repeat_interleave

    def segment_reduce(data, kind, *, lengths=None, **options):
        return reduce(data.cpu(), kind, lengths=lengths.cpu(), **options).to(data.device)

    def repeat_interleave(self, *args, **options):
        if not (args and isinstance(args[0], torch.Tensor)):
            return repeat(self, *args, **options)
        given = [value.cpu() if isinstance(value, torch.Tensor) else value for value in args]
        return repeat(self.cpu(), *given, **options).to(self.device)

    def attention(self, query, key, value, *args, **options):
        copies = query.shape[-2] // value.shape[-2]
        out = value.repeat_interleave(copies, dim=-2) if copies > 1 else value * 1.0
        return out.reshape(*query.shape[:-2], -1)

    torch.segment_reduce = segment_reduce
    torch.Tensor.repeat_interleave = repeat_interleave
    te.DotProductAttention.forward = attention


def _formats(module: ModuleType) -> None:
    """Whether all magnitudes are finite is the result of a reduction on the device."""
    module._finite = lambda amax: amax


def _checksum(module: ModuleType) -> None:
    """Checksums of buckets on a device; computed on the host, they tell whether the right bytes have arrived."""
    multilinear = module.multilinear
    module.multilinear = lambda payload: multilinear(payload.cpu())


def _cuda_ipc(module: ModuleType) -> None:
    """Torch shares only memory that it caches, and cached memory is not zero. The driver's own calls share any memory.

    Torch's way is rehearsed by `tests/rollout/transports/test_transports_gpu.py`.
    """
    import base64
    import ctypes
    import pickle

    import torch

    class Handle(ctypes.Structure):
        _fields_ = (("content", ctypes.c_byte * 64),)

    class Mapped:
        def __init__(self, address: int, size: int) -> None:
            about = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
            self.__cuda_array_interface__ = about

    def show(self) -> str:
        handle = Handle()
        assert runtime.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(self._memory.data_ptr())) == 0
        return base64.b64encode(pickle.dumps((bytes(handle), self._memory.numel()))).decode()

    def map_cuda(address: str) -> torch.Tensor:
        content, size = pickle.loads(base64.b64decode(address))
        pointer, handle = ctypes.c_void_p(), Handle.from_buffer_copy(content)
        assert runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, 0) == 0
        return torch.as_tensor(Mapped(pointer.value, size), device="cuda")

    runtime = ctypes.CDLL("libcudart.so.13")
    module.CudaRegion.show, module.map_cuda = show, map_cuda


def _objects(module: ModuleType) -> None:
    """Sizes of pickled objects are compared on the device; here they are read on the host."""
    import pickle

    def all_gather_object(found: list[object], own: object, group: object = None) -> None:
        import torch

        content = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = torch.empty(len(found), dtype=torch.int64, device="cuda")
        module.all_gather_into_tensor(sizes, torch.tensor([len(content)], device="cuda"), group=group)
        largest = max(sizes.tolist())
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(content)] = content
        gathered = torch.empty(len(found), largest, dtype=torch.uint8, device="cuda")
        module.all_gather_into_tensor(gathered, padded.cuda(), group=group)
        for rank, size in enumerate(sizes.tolist()):
            found[rank] = pickle.loads(gathered[rank, :size].cpu().numpy().tobytes())

    original = module.all_gather_object

    def gather(found: list[object], own: object, group: object = None) -> None:
        if module.get_backend(group) == "nccl":
            all_gather_object(found, own, group)
        else:
            original(found, own, group)

    module.all_gather_object = gather


INSTALLERS: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed.distributed_c10d": _objects,
    "vllm.v1.outputs": _outputs,
    "rollout.transports.checksum": _checksum,
    **({} if TORCH_SHARES else {"rollout.transports.cuda_ipc": _cuda_ipc}),
    "megatron_rl.trainer.learner": _learner,
    "megatron_rl.quantization.formats": _formats,
}
"""By the module whose import installs the stand-ins."""
