"""INT8 matrix products that are checked before an engine uses them, and exact ones for machines whose kernel is wrong.

Some kernels add INT8 products in 16 bits and saturate: oneDNN's on CPUs without VNNI is off by a fifth on random codes
(`ONEDNN_MAX_CPU_ISA=AVX2` shows the same fault on newer CPUs). So the kernel that vLLM would use multiplies small
matrices of extreme codes when an engine starts, and the results are compared with exact sums. If one of them is wrong,
`ExactInt8` replaces that kernel: codes are multiplied as float32 numbers, in chunks whose sums float32 holds exactly.
The test decides, not the name of a CPU, and GPUs are tested the same way.

Shape legend: T tokens, N output channels, K inputs.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

LARGEST_CODE = 127
CHUNK = 1024
"""Inputs whose products float32 adds exactly in any order: 1024 x 127 x 127 is below 2^24."""

_TEST_TOKENS = (1, 5, 64)
_TEST_SHAPES = ((64, 64), (48, 96), (160, 512))
"""N and K of the tested matrices: multiples of 16, as kernels ask for, and not all of them multiples of 32."""
_ROUNDING = 2.0**-7
"""Relative difference allowed between a result and the exact sum: two roundings to BF16."""

_CONFIG = Int8ScaledMMLinearLayerConfig(is_static_input_scheme=False, is_channelwise=True, input_symmetric=True)
_PARAMETERS = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
"""Names that vLLM gives to a linear layer's tensors, in the order in which kernels expect them."""

Support = tuple[bool, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """What the test of vLLM's INT8 kernel found on this machine."""

    kernel: str
    """Class name of the kernel that vLLM would use."""
    error: float
    """Largest relative error of a test product (Frobenius norm); 0 if no result differs by more than rounding."""

    @property
    def is_exact(self) -> bool:
        """Whether every test product was right."""
        return self.error == 0

    def line(self) -> str:
        """What a run says of it."""
        if self.is_exact:
            return f"INT8: test products of {self.kernel} equal exact sums"
        return (
            f"INT8: test products of {self.kernel} are off by up to {self.error:.0%} on this machine; engines multiply "
            "codes exactly in float32 instead, which takes 4 bytes a weight and more time"
        )


class ExactInt8(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """INT8 with a scale for each output channel and a dynamic one for each token; sums are exact."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Support:
        """Where vLLM's kernel is wrong."""
        return (False, "vLLM's kernel is exact") if check_vllm_kernel().is_exact else (True, None)

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> Support:
        """Whether scales are as above."""
        if c.is_channelwise and c.input_symmetric and not c.is_static_input_scheme:
            return True, None
        return False, "takes a scale for each output channel, and a dynamic one for each token"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep codes as float32 numbers, [N, K]."""
        codes, *_ = self.layer_param_names
        replace_parameter(layer, codes, getattr(layer, codes).data.float())

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Inputs [..., K] times codes [N, K] and scales [N, 1]: [..., N], in the inputs' dtype."""
        codes, scales, *_ = self._get_layer_params(layer)
        inputs, input_scales = quantise_tokens(x.reshape(-1, x.shape[-1]))
        outputs = exact_product(inputs, codes) * input_scales * scales.view(1, -1)
        if bias is not None:
            outputs += bias
        found: torch.Tensor = outputs.to(x.dtype).view(*x.shape[:-1], -1)
        return found


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
    """Offer `ExactInt8` to vLLM before its own kernels, once."""
    offered = kernels._POSSIBLE_INT8_KERNELS[current_platform._enum]
    if ExactInt8 not in offered:
        offered.insert(0, ExactInt8)


@cache
def check_vllm_kernel() -> KernelCheck:
    """Compare products of the kernel that vLLM would use here with exact sums; takes a fraction of a second."""
    kernel = _kernel_of_vllm()
    with _bf16_by_default(), torch.no_grad():
        errors = [_error(kernel, inputs, codes) for inputs, codes in _test_products()]
    return KernelCheck(kernel=kernel.__name__, error=max(errors))


def _kernel_of_vllm() -> type[Int8ScaledMMLinearKernel]:
    offered: list[type[Int8ScaledMMLinearKernel]] = kernels._POSSIBLE_INT8_KERNELS[current_platform._enum]
    for kernel in offered:
        if kernel is not ExactInt8 and kernels.is_supported_and_can_implement_kernel(kernel, _CONFIG, None)[0]:
            return kernel
    raise RuntimeError(f"vLLM has no INT8 kernel for this platform ({current_platform.device_name}); use bf16")


@contextmanager
def _bf16_by_default() -> Iterator[None]:
    """While vLLM builds a model its dtype is torch's default, and kernels read it there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _test_products() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Codes of tokens [T, K] and of weights [N, K], int8: all the largest, the largest of both signs, and random."""
    random = torch.Generator().manual_seed(0)

    def codes(rows: int, columns: int, kind: str) -> torch.Tensor:
        if kind == "largest":
            found = torch.full((rows, columns), LARGEST_CODE, device="cpu")
        elif kind == "signs":
            found = (2 * torch.randint(0, 2, (rows, columns), generator=random, device="cpu") - 1) * LARGEST_CODE
        else:
            found = torch.randint(-LARGEST_CODE, LARGEST_CODE + 1, (rows, columns), generator=random, device="cpu")
        return found.to(torch.int8)

    for num_tokens, (n, k), kind in itertools.product(_TEST_TOKENS, _TEST_SHAPES, ("largest", "signs", "random")):
        inputs = codes(num_tokens, k, kind)
        inputs[:, 0] = LARGEST_CODE  # so the scale of each token is 1, and its codes are its numbers
        yield inputs, codes(n, k, kind)


def _error(kernel: type[Int8ScaledMMLinearKernel], inputs: torch.Tensor, codes: torch.Tensor) -> float:
    """Relative error of one product; 0 where no result differs from the exact sum by more than rounding."""
    exact = inputs.double() @ codes.double().t()
    found = _multiply(kernel, inputs, codes).double().cpu()
    if bool(((found - exact).abs() <= _ROUNDING * exact.abs() + 1).all()):
        return 0.0
    return float((found - exact).norm() / exact.norm())


def _multiply(kernel: type[Int8ScaledMMLinearKernel], inputs: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The product [T, N] in BF16 by `kernel`, through a layer such as vLLM makes; scales are 1."""
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


if __name__ == "__main__":
    current_platform.import_kernels()
    print(check_vllm_kernel().line())
