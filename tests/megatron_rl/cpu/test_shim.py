import ast
import subprocess
import sys

import pytest
import torch

from megatron_rl.cpu.shim import renamed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = torch.empty(3, device='cuda')", "x = torch.empty(3, device='cpu')"),
        (
            "x = torch.empty(3, device=torch.cuda.current_device())",
            "x = torch.empty(3, device=_torch_cuda.current_device())",
        ),
        ("x = y.cuda(non_blocking=True)", "x = y.cpu()"),
        ("x = torch.zeros(2, pin_memory=True).cuda()", "x = torch.zeros(2, pin_memory=False).cpu()"),
        ("t = ['torch.cuda.HalfTensor']", "t = ['torch.HalfTensor']"),
        ("from torch.cuda import _lazy_call", "from megatron_rl.cpu.device import _lazy_call"),
        ("raise RuntimeError('no cuda here')", "raise RuntimeError('no cuda here')"),
        ("import fused_weight_gradient_mlp_cuda", "import fused_weight_gradient_mlp_cuda"),
    ],
)
def test_only_references_to_the_device_are_renamed(source, expected):
    assert ast.unparse(renamed(source, "f")).removeprefix("import megatron_rl.cpu.device as _torch_cuda\n") == expected


def test_docstring_and_future_imports_stay_first():
    code = compile(renamed('"""Doc."""\nfrom __future__ import annotations\nx: Later = 1\n', "f"), "f", "exec")
    names = {}
    exec(code, names)
    assert names["__doc__"] == "Doc." and names["x"] == 1


def run(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing beside a CUDA device")
def test_megatron_runs_on_the_cpu_and_torch_is_unchanged():
    done = run(
        "import torch\n"
        "before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}\n"
        "from megatron_rl.cpu import shim as cpu_shim\n"
        "cpu_shim.install(); cpu_shim.install()\n"
        "from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random\n"
        "from megatron.core import jit\n"
        "assert random._get_cuda_rng_state().device.type == 'cpu'\n"
        "assert jit.jit_fuser(len) is len\n"
        "assert all(getattr(torch.cuda, name) is value for name, value in before.items())\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing beside a CUDA device")
def test_the_shim_is_refused_after_megatron_was_imported():
    done = run("import megatron.core\nfrom megatron_rl.cpu import shim as cpu_shim\ncpu_shim.install()")
    assert "RuntimeError: megatron.core was imported before the CPU shim" in done.stderr
