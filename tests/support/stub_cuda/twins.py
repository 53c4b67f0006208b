"""Operations of torch on stub devices compute: the host's kernels work on the same memory.

A stub device has the memory of the host, so a tensor of a device and its alias on the host share their bytes. Every
operation of `aten` with a kernel for devices gets a kernel in Python instead: it makes the aliases, calls the operation
on the host, and gives new results a tensor on the device. Views and allocations stay as they are.

So numbers on a stub device are those of the host's kernels, and rehearsed code emits real tokens. Kernels of Triton
compute if its interpreter is on (TRITON_INTERPRET). Other kernels that are called past torch still compute nothing;
those of vLLM that our engines need have a twin in `vllm_twins`.
"""

import ctypes
import warnings
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

KEEP = (
    *("empty", "empty_strided", "set_", "resize_", "record_stream", "_local_scalar_dense", "is_set_to", "_pin_memory"),
    *("_has_same_storage_numel", "_cudnn_init_dropout_state", "_use_cudnn_ctc_loss"),
    *("_efficient_attention_forward", "_flash_attention_forward", "_resize_output_"),
)
"""Operations without a view in their schema that compute nothing, or that have no kernel for the host."""

_PLAIN_ATTENTION = 0
"""Torch's number of attention by matrix products, which is no kernel of its own."""

_library: torch.library.Library | None = None
_generators: dict[int, torch.Generator] = {}


def install() -> None:
    """Replace the kernels of this process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL", "CUDA")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    has_twin = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or not (has_kernel(full_name, "CUDA") or full_name == "aten::copy_"):
            continue
        operation = overload(name)
        if name.partition(".")[0] in KEEP or not has_twin(full_name, "CPU") or _is_view(operation):
            continue
        twin = kernel(operation) if name != "_fused_sdp_choice" else lambda *_, **__: _PLAIN_ATTENTION
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            _library.impl(name, twin, "CUDA", allow_override=True)


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), kind or "default")


def _is_view(operation: torch._ops.OpOverload) -> bool:
    """Whether a result shares the memory of an argument that is not written."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operation._schema.returns)


def kernel(operation: Callable[..., object]) -> Callable[..., object]:
    """A kernel for devices that calls an operation on the host."""

    def call(*args: object, **options: object) -> object:
        by_alias: dict[int, torch.Tensor] = {}
        given: list[tuple[torch.Tensor, torch.Tensor]] = []
        device = torch.device("cuda", torch.cuda.current_device())

        def host(value: object) -> object:
            nonlocal device
            if isinstance(value, torch.Tensor) and value.is_cuda:
                device = value.device
                alias = alias_of(value)
                by_alias[id(alias)] = value
                given.append((alias, value))
                return alias
            if isinstance(value, torch.Generator) and value.device.type == "cuda":
                return _generator(value)
            if isinstance(value, torch.device) and value.type == "cuda":
                return torch.device("cpu")
            return value

        def back(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            return by_alias[id(value)] if id(value) in by_alias else to_device(value, device)

        chosen = _form_for(operation, args) if isinstance(operation, torch._ops.OpOverload) else operation
        result = chosen(*tree_map(host, args), **tree_map(host, options))
        for alias, value in given:
            if alias.shape != value.shape:  # an empty result that the operation has filled
                value.resize_(alias.shape)
                alias_of(value).copy_(alias)
        return tree_map(back, result)

    return call


def _form_for(operation: torch._ops.OpOverload, args: tuple[object, ...]) -> Callable[..., object]:
    """Torch hands over a number that stands for a tensor as a number; another form of the operation takes that."""
    has_number = any(
        isinstance(value, int | float) and isinstance(expected.type, torch.TensorType)
        for value, expected in zip(args, operation._schema.arguments, strict=False)
    )
    return operation.overloadpacket if has_number else operation


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host on the same memory; an empty one has memory of its own, so that it can grow."""
    empty = torch.empty(0, dtype=tensor.dtype)
    if tensor.numel() == 0:
        return empty.new_empty(tensor.shape)
    storage = tensor.untyped_storage()
    shared = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return empty.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new tensor of a device with the bytes of one of the host."""
    dense = tensor if tensor.is_contiguous() or _is_dense(tensor) else tensor.contiguous()
    made = torch.empty_strided(dense.shape, dense.stride(), dtype=dense.dtype, device=device)
    if dense.numel():
        ctypes.memmove(made.data_ptr(), dense.data_ptr(), dense.numel() * dense.element_size())
    return made


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _generator(of_device: torch.Generator) -> torch.Generator:
    """The host's generator beside one of a device, with the same seed."""
    key = id(of_device)
    if key not in _generators:
        _generators[key] = torch.Generator().manual_seed(of_device.initial_seed())
    return _generators[key]
