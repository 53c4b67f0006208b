"""FP8 parameters without Transformer Engine.

`FakeFp8Parameter` has only the fields of an FP8 parameter: code that uses it as a tensor fails.
`BlockTensor` is also a torch tensor, so Megatron's buffers, optimizer and checkpoints accept it; `in_megatron` does
Transformer Engine's part there. Both follow transformer_engine 2.12; kernels are the project's.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import torch

from megatron_rl.quantization.fp8 import block_amax, fp8_block_codes, fp8_block_values, fp8_scale


class Quantizer:
    force_pow_2_scales = True


def padded(grid):
    """Columns padded with NaN to a multiple of four."""
    return torch.nn.functional.pad(grid, (0, -grid.shape[1] % 4), value=float("nan"))


class Fields:
    """Codes and scales in the layout of `Float8BlockwiseQTensor`."""

    _is_2D_scaled = True  # noqa: N815  upstream's name

    def begin(self, weight):
        self._quantizer = Quantizer()
        self._rowwise_data = torch.empty(weight.shape, dtype=torch.uint8)
        self.quantize_(weight)
        self._high_precision_init_val = weight

    def quantize_(self, weight):
        assert weight.shape == self.shape and weight.dtype == self.dtype
        scale = fp8_scale(block_amax(weight), power_of_two=True, dtype=torch.bfloat16)
        self._rowwise_data.copy_(fp8_block_codes(weight, scale).view(torch.uint8))
        self._columnwise_data = self._rowwise_data.t().contiguous()
        self._rowwise_scale_inv = padded(1.0 / scale)
        self._columnwise_scale_inv = padded((1.0 / scale).t())

    def get_high_precision_init_val(self):
        return self._high_precision_init_val

    def clear_high_precision_init_val(self):
        self._high_precision_init_val = None


class FakeFp8Parameter(Fields):
    """A parameter that cannot be sliced, detached or written to."""

    def __init__(self, weight):
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.begin(weight)


class BlockTensor(Fields, torch.Tensor):
    """A tensor that decodes for every torch operation; writes that would be lost or would quantise implicitly fail."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def of(cls, weight):
        made = cls(weight)
        made.begin(weight)
        return made

    def dequantize(self):
        codes, columns = self._rowwise_data.view(torch.float8_e4m3fn), -(-self.shape[1] // 128)
        return fp8_block_values(codes, self._rowwise_scale_inv[:, :columns]).to(self.dtype)

    @property
    def data(self):
        return self

    def untyped_storage(self):
        return self._rowwise_data.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments, keywords=None):
        if function is torch.ops.aten.detach.default:
            view = cls(arguments[0])
            view.__dict__.update(arguments[0].__dict__)
            return view
        if function is torch.ops.aten.copy_.default and isinstance(arguments[0], cls):
            return arguments[0].quantize_(arguments[1])
        assert not function._schema.is_mutable, function
        plain = torch.utils._pytree.tree_map(lambda one: one.dequantize() if isinstance(one, cls) else one, arguments)
        return function(*plain, **(keywords or {}))


def _replace(tensor, raw):
    """`replace_raw_data`"""
    raw.copy_(tensor._rowwise_data)
    tensor._rowwise_data = raw


def _quantize_shards(parameters, shards, offsets, group, fsdp=None):
    """`cast_master_weights_to_fp8`, by quantising the whole matrix."""
    for parameter, shard, offset in zip(parameters, shards, offsets, strict=True):
        whole = torch.zeros(parameter.numel())
        if shard is not None:
            whole[offset : offset + shard.numel()] = shard
        torch.distributed.all_reduce(whole, group=group)
        parameter.quantize_(whole.view(parameter.shape).to(parameter.dtype))


def _build(real):
    def build(spec, parallel, position, options):
        (model,) = real(spec, parallel, position, replace(options, fp8="none"))  # which needs a GPU
        for module in model.decoder.layers.modules():
            for name, parameter in (
                list(module.named_parameters(recurse=False)) if options.fp8 == "blockwise_param" else ()
            ):
                if parameter.ndim == 2:
                    # initial values of a parameter are not weights
                    made = torch.nn.Parameter(BlockTensor.of(torch.ones_like(parameter.detach())))
                    made.__dict__.update(parameter.__dict__)
                    module.register_parameter(name, made)
        return [model]

    return build


@contextmanager
def in_megatron():
    """Lets the trainer build FP8 parameters on a CPU and Megatron use them."""
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_rl.trainer import trainer

    with ExitStack() as stack:

        def put(target, **values):
            for name, value in values.items():
                stack.enter_context(mock.patch.object(target, name, value))

        put(fp8_utils, FP8_TENSOR_CLASS=BlockTensor, HAVE_TE_FP8_TENSOR_CLASS=True)
        put(fp8_utils, _modify_underlying_storage_impl=_replace, _quantize_param_shard_impl=_quantize_shards)
        # gloo treats tensors of several dtypes as one dtype
        put(param_and_grad_buffer, _coalescing_manager=lambda *_, **__: nullcontext())
        put(trainer, build=_build(trainer.build))
        yield
