"""Answers where host code reads what a kernel of a device would have computed. Each names its operation.

They are installed when a module is imported (`site/sitecustomize.py`), so that only the modules that need one have it.
Every process of a rehearsal imports this file, before torch. An operation that is stood in for leaves a file of its
name in the folder that `NOTES` names, so that the record can say so.
"""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

NOTES = "STOOD_IN_FOR"
"""Environment variable of that folder."""
COMPUTES = "STUB_CUDA_COMPUTES" in os.environ
"""Whether torch's operations on stub devices compute (`tests.support.stub_cuda.twins`)."""
TORCH_SHARES = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


def install(module: ModuleType) -> None:
    """Install the stand-ins that belong to a module, after its import."""
    INSTALLERS[module.__name__](module)


@functools.cache
def note(operation: str) -> None:
    """An operation has been stood in for, in this process."""
    if folder := os.environ.get(NOTES):
        Path(folder, operation).touch()


def noted(operation: str, stand_in: Callable[..., object]) -> Callable[..., object]:
    """The stand-in, which leaves a note when it is called."""

    @functools.wraps(stand_in)
    def call(*args, **options):
        note(operation)
        return stand_in(*args, **options)

    return call


def unseen(stand_in: Callable[..., object]) -> Callable[..., object]:
    """The stand-in, whose waits for the device torch does not count: the operation itself has none."""

    @functools.wraps(stand_in)
    def call(*args, **options):
        import torch

        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(0)
        try:
            return stand_in(*args, **options)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return call


def _outputs(module: ModuleType) -> None:
    """A kernel counts the rows that a mask selects on a device; those that the sampler brings to the host need none."""
    import torch

    tensors = module.LogprobsTensors
    own = tensors.filter
    chosen = lambda self, mask: tensors(*(part[torch.from_numpy(mask)] for part in self[:3]))  # noqa: E731
    on_device = noted("LogprobsTensors.filter", chosen)
    tensors.filter = lambda self, mask: (on_device if self.logprobs.is_cuda else own)(self, mask)


def _learner(module: ModuleType) -> None:
    """Lengths that a kernel would have computed are garbage; cuDNN's attention needs a real driver.

    Tensors are joined on the host, so that what is exported and loaded has the right bytes.
    """
    import torch
    import transformer_engine.pytorch as te

    reduce, repeat, join = torch.segment_reduce, torch.Tensor.repeat_interleave, torch.cat

    def segment_reduce(data, kind, *, lengths=None, **options):
        note("segment_reduce")
        return reduce(data.cpu(), kind, lengths=lengths.cpu(), **options).to(data.device)

    def repeat_interleave(self, *args, **options):
        if not (args and isinstance(args[0], torch.Tensor)):
            return repeat(self, *args, **options)
        note("repeat_interleave by a tensor")
        given = [value.cpu() if isinstance(value, torch.Tensor) else value for value in args]
        return repeat(self.cpu(), *given, **options).to(self.device)

    def attention(self, query, key, value, *args, **options):
        note("attention")
        copies = query.shape[-2] // value.shape[-2]
        out = value.repeat_interleave(copies, dim=-2) if copies > 1 else value * 1.0
        return out.reshape(*query.shape[:-2], -1)

    def cat(tensors, *args, **options):
        parts = tuple(tensors)
        if not all(part.is_cuda for part in parts) or "out" in options:
            return join(parts, *args, **options)
        note("cat")
        return join([part.cpu() for part in parts], *args, **options).to(parts[0].device)

    torch.cat = unseen(cat)
    torch.segment_reduce = unseen(segment_reduce)
    torch.Tensor.repeat_interleave = unseen(repeat_interleave)
    te.DotProductAttention.forward = attention


def _formats(module: ModuleType) -> None:
    """Whether all magnitudes are finite is the result of a reduction on the device."""
    module._finite = noted("whether magnitudes are finite", lambda amax: amax)


def _checksum(module: ModuleType) -> None:
    """Checksums of buckets on a device; computed on the host, they tell whether the right bytes have arrived."""
    multilinear = module.multilinear
    module.multilinear = noted("checksums of buckets", lambda payload: multilinear(payload.cpu()))


def _cuda_ipc(module: ModuleType) -> None:
    """Torch shares only memory that it caches, and cached memory is not zero. The driver's own calls share any memory.

    Torch's way is rehearsed by `test_transports_gpu.py` and `test_cuda_ipc_gpu.py` in `tests/rollout/transports`.
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
    module.CudaRegion.show, module.map_cuda = noted("torch's handles of CUDA IPC", show), map_cuda


def _objects(module: ModuleType) -> None:
    """Sizes of pickled objects are compared and added on the device; here they are read on the host."""
    import pickle

    def of_all(own: object, group: object) -> list[object]:
        import torch

        note("sizes of pickled objects")
        count = module.get_world_size(group)
        content = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = torch.empty(count, dtype=torch.int64, device="cuda")
        module.all_gather_into_tensor(sizes, torch.tensor([len(content)], device="cuda"), group=group)
        padded = torch.zeros(max(sizes.tolist()), dtype=torch.uint8)
        padded[: len(content)] = content
        gathered = torch.empty(count, len(padded), dtype=torch.uint8, device="cuda")
        module.all_gather_into_tensor(gathered, padded.cuda(), group=group)
        return [
            pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(gathered.cpu(), sizes.tolist(), strict=True)
        ]

    def place(rank: int | None, in_group: int | None, group: object) -> int:
        return in_group if in_group is not None else module.get_group_rank(group or module.GroupMember.WORLD, rank or 0)

    def all_gather_object(object_list, obj, group=None):
        object_list[:] = of_all(obj, group)

    def gather_object(obj, object_gather_list=None, dst=None, group=None, group_dst=None):
        everything = of_all(obj, group)
        if object_gather_list is not None and module.get_rank(group) == place(dst, group_dst, group):
            object_gather_list[:] = everything

    def scatter_object_list(
        scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, group_src=None
    ):
        given = of_all(scatter_object_input_list, group)[place(src, group_src, group)]
        scatter_object_output_list[0] = given[module.get_rank(group)]

    def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None):
        object_list[:] = of_all(list(object_list), group)[place(src, group_src, group)]

    def on_devices(stand_in: Callable[..., None]) -> None:
        original = getattr(module, stand_in.__name__)
        names = inspect.signature(stand_in)

        def chosen(*args, **options):
            group = names.bind(*args, **options).arguments.get("group")
            return (stand_in if module.get_backend(group) == "nccl" else original)(*args, **options)

        setattr(module, stand_in.__name__, chosen)

    for stand_in in (all_gather_object, gather_object, scatter_object_list, broadcast_object_list):
        on_devices(stand_in)


def _twins(module: ModuleType) -> None:
    from tests.support.stub_cuda import twins

    twins.install()


def _vllm_twins(module: ModuleType) -> None:
    from tests.support.stub_cuda import vllm_twins

    vllm_twins.install(*_NAMESPACES[module.__name__])


def _top_k(module: ModuleType) -> None:
    """Triton's interpreter cannot run the kernel; vLLM has a form without it."""
    plain = lambda logits, k, p: module.apply_top_k_top_p_pytorch(logits, k, p)  # noqa: E731
    module.apply_top_k_top_p_triton = noted("the largest logits", plain)


def _interpreter(module: ModuleType) -> None:
    """Triton's interpreter keeps BF16 as its bits, and multiplies matrices of them as integers (Triton 3.6)."""
    import numpy as np
    import torch
    import triton.language as tl

    multiply = module.InterpreterBuilder.create_dot

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.int16)).view(torch.bfloat16)
        return module.TensorHandle(numbers.float().numpy(), tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, wide(a), wide(b), *rest)

    module.InterpreterBuilder.create_dot = create_dot


_NAMESPACES = {
    "vllm._custom_ops": ("_C", "_C_cache_ops", "_moe_C"),
    "vllm.vllm_flash_attn.flash_attn_interface": ("_vllm_fa3_C",),
}
"""Of vLLM's operations, by the module whose import loads them."""

_INTERPRETER = "triton.runtime.interpreter"
_TOP_K = "vllm.v1.sample.ops.topk_topp_sampler"

INSTALLERS: dict[str, Callable[[ModuleType], None]] = {
    **(
        {
            "torch": _twins,
            **dict.fromkeys(_NAMESPACES, _vllm_twins),
            _TOP_K: _top_k,
            _INTERPRETER: _interpreter,
        }
        if COMPUTES
        else {}
    ),
    "torch.distributed.distributed_c10d": _objects,
    "vllm.v1.outputs": _outputs,
    "rollout.transports.checksum": _checksum,
    **({} if TORCH_SHARES else {"rollout.transports.cuda_ipc": _cuda_ipc}),
    "megatron_rl.trainer.learner": _learner,
    "megatron_rl.quantization.formats": _formats,
}
"""By the module whose import installs the stand-ins."""
