"""INT8 products are exact: by vLLM's kernel if it is exact, else by ours."""

import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.kernels import linear as kernels
from vllm.platforms import current_platform

from rollout.processes import ProcessEnv
from rollout.worker import exact_int8
from rollout.worker.exact_int8 import CHUNK, ExactInt8, KernelCheck, exact_product, quantise_tokens
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT


def random_codes(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@given(
    num_tokens=st.integers(1, 9),
    num_outputs=st.integers(1, 9),
    num_inputs=st.integers(1, 3 * CHUNK + 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=50, deadline=None)
def test_products_equal_integer_products(num_tokens, num_outputs, num_inputs, seed):
    inputs, codes = random_codes(num_tokens, num_inputs, seed), random_codes(num_outputs, num_inputs, seed + 1)
    expected = (inputs.long() @ codes.long().t()).float()
    assert torch.equal(exact_product(inputs.float(), codes.float()), expected)


@pytest.mark.parametrize("num_inputs", [CHUNK, CHUNK + 1, 18944])
def test_products_of_the_largest_codes_are_exact(num_inputs):
    inputs, codes = torch.full((2, num_inputs), 127.0), torch.full((3, num_inputs), -127.0)
    expected = torch.full((2, 3), -127 * 127 * num_inputs, dtype=torch.int64).float()
    assert torch.equal(exact_product(inputs, codes), expected)


def test_a_chunk_of_the_largest_codes_is_exact_in_float32():
    assert CHUNK * 127 * 127 < 2**24


def test_codes_of_tokens_approximate_the_inputs_to_half_a_code():
    inputs = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    inputs[3] = 0
    codes, scales = quantise_tokens(inputs)
    assert torch.equal(codes, codes.round()) and codes.abs().max() == 127
    assert ((codes * scales - inputs.float()).abs() <= 0.5001 * scales).all()
    assert (codes[3] == 0).all()


def linear_layer(codes: torch.Tensor, scales: torch.Tensor, kernel: ExactInt8) -> torch.nn.Module:
    layer = torch.nn.Module()
    for name in ("input_scale", "input_zero_point", "azp_adj", "bias"):
        layer.register_parameter(name, None)
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    return layer


def test_a_layer_multiplies_by_its_codes_scales_and_bias(monkeypatch):
    monkeypatch.setattr(exact_int8, "check_vllm_kernel", lambda: KernelCheck(kernel="wrong", error=0.2))
    kernel = ExactInt8(exact_int8._CONFIG, exact_int8._PARAMETERS)
    codes, scales = random_codes(6, 1500, 3), torch.rand(6, 1) + 0.5
    layer = linear_layer(codes, scales, kernel)
    inputs, bias = torch.randn(2, 5, 1500, generator=torch.Generator().manual_seed(4)), torch.randn(6)
    tokens, token_scales = quantise_tokens(inputs.view(10, 1500))
    expected = (tokens.double() @ codes.double().t() * token_scales.double() * scales.double().t()).view(2, 5, 6)
    torch.testing.assert_close(
        kernel.apply_weights(layer, inputs, bias).double(), expected + bias, rtol=1e-6, atol=1e-4
    )


def test_vllms_kernel_is_replaced_only_where_it_is_inexact(monkeypatch):
    monkeypatch.setattr(exact_int8, "check_vllm_kernel", lambda: KernelCheck(kernel="right", error=0.0))
    assert not ExactInt8.is_supported()[0]
    monkeypatch.setattr(exact_int8, "check_vllm_kernel", lambda: KernelCheck(kernel="wrong", error=0.05))
    assert ExactInt8.is_supported()[0]


def test_our_kernel_is_registered_with_vllm_once_and_first():
    for _ in range(2):
        exact_int8.register()
    offered = kernels._POSSIBLE_INT8_KERNELS[current_platform._enum]
    assert offered[0] is ExactInt8 and offered.count(ExactInt8) == 1


def test_the_log_line_names_the_kernel_and_the_consequence():
    assert KernelCheck(kernel="K", error=0.0).line() == "INT8: test products of K equal exact sums"
    assert "test products of K are off by up to 21% on this machine" in KernelCheck(kernel="K", error=0.21).line()


CHOSEN = """
import torch
import vllm.v1.worker.cpu_worker
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.platforms import current_platform
from rollout.worker import exact_int8
from tests.support.deadline import DEADLINE_S
current_platform.import_kernels()
exact_int8.register()
check = exact_int8.check_vllm_kernel()
chosen = init_int8_linear_kernel(
    is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="test"
)
with exact_int8._bf16_by_default():
    errors = [exact_int8._error(type(chosen), *pair) for pair in exact_int8._test_products()]
print(check.is_exact, type(chosen).__name__, max(errors))
"""


def chosen_with(isa: str) -> list[str]:
    """(vLLM's kernel is exact, chosen kernel, its error) with oneDNN limited to `isa`."""
    environment = os.environ | ProcessEnv(single_node=True).engine(threads=1)
    environment |= {"PYTHONPATH": str(ROOT), "ONEDNN_MAX_CPU_ISA": isa}
    command = [sys.executable, "-c", CHOSEN]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.slow
def test_a_kernel_that_saturates_is_found_and_replaced_on_every_cpu():
    """oneDNN without VNNI is inexact on every CPU, but vLLM may choose another kernel on newer CPUs."""
    is_exact, chosen, error = chosen_with("AVX2")
    assert float(error) == 0
    assert (is_exact, chosen) == ("False", "ExactInt8")


@pytest.mark.slow
def test_the_kernel_that_this_machine_chooses_is_exact():
    is_exact, chosen, error = chosen_with("DEFAULT")
    assert float(error) == 0
    assert (chosen == "ExactInt8") == (is_exact == "False")


def line_of_the_command(*options: str, **variables: str) -> str:
    """The only line on stdout of `python -m rollout.worker.exact_int8`."""
    environment = os.environ | ProcessEnv(single_node=True).engine(threads=1) | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    return line


@pytest.mark.slow
@pytest.mark.long
def test_the_command_prints_its_line_alone_also_for_a_wrong_kernel():
    line = line_of_the_command("-m", "rollout.worker.exact_int8", ONEDNN_MAX_CPU_ISA="AVX2")
    assert re.fullmatch(r"INT8: test products of \w+ are off by up to \d+% on this machine; .*", line)


NO_KERNEL = """
import runpy
from vllm.model_executor.kernels import linear
linear._POSSIBLE_INT8_KERNELS.clear()
runpy.run_module("rollout.worker.exact_int8", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.long
def test_the_command_says_so_where_vllm_has_no_kernel():
    line = line_of_the_command("-c", NO_KERNEL, VLLM_LOGGING_STREAM="ext://sys.stderr")
    assert line.startswith("INT8: not asked: vLLM has no INT8 kernel for this platform (")
