"""Tests vLLM's INT8 kernel when an engine starts, and multiplies exactly where that kernel is wrong.

Some kernels add INT8 products in 16 bits and saturate. oneDNN's kernel on CPUs without VNNI is off by a fifth on random
codes; `ONEDNN_MAX_CPU_ISA=AVX2` reproduces the fault on newer CPUs. So the kernel that vLLM would use multiplies small
matrices of extreme codes, and the results are compared with exact sums. If one result is wrong, `ExactInt8` replaces
the kernel: it multiplies codes as float32 numbers, in chunks whose sums float32 holds exactly. The test decides, not
the name of a CPU. GPUs are tested in the same way.

`python -m rollout.worker.exact_int8` runs the test alone. It prints one line on stdout (vLLM's log goes to stderr) and
exits with status 0, whether the kernel is right, wrong or absent. The line has one of these forms:

    INT8: test products of KERNEL equal exact sums
    INT8: test products of KERNEL are off by up to PERCENT on this machine; engines multiply codes exactly ...
    INT8: not asked: vLLM has no INT8 kernel for this platform (NAME)

Any other exit status means that the test did not finish; stderr says why.

Shape legend: T tokens, N output channels, K inputs.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

if __name__ == "__main__":  # vLLM reads it when it is imported, and logs to stdout by default
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"

from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from rollout.cpu import quirks

LARGEST_CODE = 127
CHUNK = 1024
"""Inputs whose products float32 adds exactly in any order: 1024 x 127 x 127 is below 2^24."""

_TEST_TOKENS = (1, 5, 64)
_TEST_SHAPES = ((64, 64), (48, 96), (160, 512))
"""N and K of the tested matrices: multiples of 16, which kernels require; some are not multiples of 32."""
_ROUNDING = 2.0**-7
"""Relative difference allowed between a result and the exact sum: two roundings to BF16."""

_CONFIG = Int8ScaledMMLinearLayerConfig(is_static_input_scheme=False, is_channelwise=True, input_symmetric=True)
_PARAMETERS = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
"""Names that vLLM gives to a linear layer's tensors, in the order in which kernels expect them."""

Support = tuple[bool, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """Result of the test of vLLM's INT8 kernel on this machine."""

    kernel: str
    """Class name of the kernel that vLLM would use."""
    error: float
    """Largest relative error of a test product (Frobenius norm); 0 if no result differs by more than rounding."""

    @property
    def is_exact(self) -> bool:
        """Whether every test product was right."""
        return self.error == 0

    def line(self) -> str:
        """The result as one line for the log of a run; the forms are in the head of this file."""
        if self.is_exact:
            return f"INT8: test products of {self.kernel} equal exact sums"
        return (
            f"INT8: test products of {self.kernel} are off by up to {self.error:.0%} on this machine; engines multiply "
            "codes exactly in float32 instead, which takes 4 bytes a weight and more time"
        )


class ExactInt8(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """INT8 with a scale for each output channel and a dynamic scale for each token; sums are exact."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Support:
        """Supported only where vLLM's kernel is wrong."""
        return (False, "vLLM's kernel is exact") if check_vllm_kernel().is_exact else (True, None)

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> Support:
        """Whether weights have channel scales, and inputs symmetric dynamic scales."""
        if c.is_channelwise and c.input_symmetric and not c.is_static_input_scheme:
            return True, None
        return False, "needs a scale for each output channel and a dynamic scale for each token"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Store the codes as float32 numbers, [N, K]."""
        codes, *_ = self.layer_param_names
        replace_parameter(layer, codes, getattr(layer, codes).data.float())

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Inputs [..., K] times codes [N, K] and scales [N, 1]: [..., N], in the inputs' dtype."""
        codes, scales, *_ = self._get_layer_params(layer)
        inputs, input_scales = quantise_tokens(x.reshape(-1, x.shape[-1]))
        outputs = exact_product(inputs, codes) * input_scales * scales.view(1, -1)
        if bias is not None:
            outputs += bias
        products: torch.Tensor = outputs.to(x.dtype).view(*x.shape[:-1], -1)
        return products


def quantise_tokens(inputs_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, K] as float32 numbers, and the scale of each token [T, 1]."""
    inputs = inputs_TK.float()
    scales = inputs.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST_CODE
    return (inputs / scales).round().clamp(-LARGEST_CODE, LARGEST_CODE), scales


def exact_product(inputs_TK: torch.Tensor, codes_NK: torch.Tensor) -> torch.Tensor:
    """Integer products of codes given as float32 numbers; the sum [T, N] is rounded to float32 once."""
    chunks = zip(torch.split(inputs_TK, CHUNK, dim=1), torch.split(codes_NK, CHUNK, dim=1), strict=True)
    products: list[torch.Tensor] = [inputs @ codes.t() for inputs, codes in chunks]
    if len(products) == 1:
        return products[0]
    total = products[0].to(torch.int32)
    for product in products[1:]:
        total += product.to(torch.int32)
    return total.float()


def register() -> None:
    """Put `ExactInt8` before vLLM's own kernels; a second call changes nothing."""
    offered = kernels._POSSIBLE_INT8_KERNELS[current_platform._enum]
    if ExactInt8 not in offered:
        offered.insert(0, ExactInt8)


@cache
def check_vllm_kernel() -> KernelCheck:
    """Compare products of the kernel that vLLM would use here with exact sums; takes a fraction of a second.

    Raises:
        RuntimeError: vLLM has no INT8 kernel for this platform.
    """
    kernel = _vllm_kernel()
    if kernel is None:
        raise RuntimeError(f"vLLM has no INT8 kernel for this platform ({_platform()}); use engine.format=bf16")
    with _bf16_by_default(), torch.no_grad():
        errors = [_error(kernel, inputs, codes) for inputs, codes in _test_products()]
    return KernelCheck(kernel=kernel.__name__, error=max(errors))


def _vllm_kernel() -> type[Int8ScaledMMLinearKernel] | None:
    """The kernel that vLLM chooses without `ExactInt8`; None if it has none for this platform."""
    offered: list[type[Int8ScaledMMLinearKernel]] = kernels._POSSIBLE_INT8_KERNELS.get(current_platform._enum, [])
    for kernel in offered:
        if kernel is not ExactInt8 and kernels.is_supported_and_can_implement_kernel(kernel, _CONFIG, None)[0]:
            return kernel
    return None


def _platform() -> str:
    return current_platform.device_name or "unknown"


@contextmanager
def _bf16_by_default() -> Iterator[None]:
    """Set torch's default dtype, where kernels read the dtype of the model, as vLLM does while it builds one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _test_products() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Codes of tokens [T, K] and weights [N, K], int8: all 127, random signs of 127, and random codes."""
    random = torch.Generator().manual_seed(0)

    def codes(rows: int, columns: int, kind: str) -> torch.Tensor:
        if kind == "largest":
            numbers = torch.full((rows, columns), LARGEST_CODE, device="cpu")
        elif kind == "signs":
            numbers = (2 * torch.randint(0, 2, (rows, columns), generator=random, device="cpu") - 1) * LARGEST_CODE
        else:
            numbers = torch.randint(-LARGEST_CODE, LARGEST_CODE + 1, (rows, columns), generator=random, device="cpu")
        return numbers.to(torch.int8)

    for num_tokens, (n, k), kind in itertools.product(_TEST_TOKENS, _TEST_SHAPES, ("largest", "signs", "random")):
        inputs = codes(num_tokens, k, kind)
        inputs[:, 0] = LARGEST_CODE  # so each token has scale 1, and its codes are its inputs
        yield inputs, codes(n, k, kind)


def _error(kernel: type[Int8ScaledMMLinearKernel], inputs: torch.Tensor, codes: torch.Tensor) -> float:
    """Relative error of one product; 0 where no result differs from the exact sum by more than rounding."""
    exact = inputs.double() @ codes.double().t()
    products = _multiply(kernel, inputs, codes).double().cpu()
    if bool(((products - exact).abs() <= _ROUNDING * exact.abs() + 1).all()):
        return 0.0
    return float((products - exact).norm() / exact.norm())


def _multiply(kernel: type[Int8ScaledMMLinearKernel], inputs: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The product [T, N] in BF16 by `kernel`, through a layer with the attributes that vLLM sets; scales are 1."""
    device = torch.device(current_platform.device_type)
    layer = torch.nn.Module()
    layer.__dict__["logical_widths"] = [len(codes)]
    for name in (*_PARAMETERS, "bias"):
        layer.register_parameter(name, None)
    layer.weight = torch.nn.Parameter(codes.to(device), requires_grad=False)
    scales = torch.ones(len(codes), 1, dtype=torch.float32, device=device)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    multiplier = kernel(_CONFIG, _PARAMETERS)
    multiplier.process_weights_after_loading(layer)
    outputs: torch.Tensor = multiplier.apply_weights(layer, inputs.to(device, torch.bfloat16))
    return outputs


def _main() -> None:
    current_platform.import_kernels()
    if current_platform.is_cpu():  # as `rollout.worker.worker`, so that the kernel is the one that engines would use
        quirks.int8_kernel_refuses_rows_that_vllm_offers_it()
        quirks.first_small_batch_dies_with_illegal_instruction()
        quirks.int8_logits_are_uniform_after_reload()
    if _vllm_kernel() is None:
        print(f"INT8: not asked: vLLM has no INT8 kernel for this platform ({_platform()})")
    else:
        print(check_vllm_kernel().line())


if __name__ == "__main__":
    _main()
