"""The two INT8 kernels that vLLM has for CPUs: what packing a matrix costs at every publish, and products with it.

`python -m benchmarks.publish.int8_kernels --json OUT`: vLLM takes the *packed* one (its own) on CPUs with AMX and
oneDNN's elsewhere; `rollout.cpu.quirks.int8_is_loaded_slowly_on_cpus_without_amx` takes the packed one wherever it
runs. One thread, codes of 8 bits by token and channel, matrices of the model of `benchmarks.publish`. Both take turns;
medians.
Rows: `pack` (ns a weight), `multiply` (microseconds, rounding of inputs included), and how far off the product is, over
its own size, from one in float32 that rounds nothing.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from benchmarks.harness.record import Row, arguments, write

SHAPES = {"query, key, value": (1536, 1024), "output": (1024, 1024), "gate, up": (8192, 1024), "down": (1024, 4096)}
"""Rows and columns."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
REPEATS = 15


def in_turns(methods: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each; once before the clock starts."""
    took: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats + 1):
        for name, run in methods.items():
            began = time.perf_counter()
            run()
            took[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds[1:]) for name, seconds in took.items()}


def rows_of(name: str, tokens: Sequence[int], repeats: int) -> list[Row]:
    """Both kernels on one matrix."""
    num_rows, num_columns = SHAPES[name]
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (num_rows, num_columns), generator=random, dtype=torch.int8)
    scales = torch.rand(num_rows, 1, generator=random) + 0.5
    packing = {
        "onednn": lambda: ops.create_onednn_scaled_mm(codes.t(), scales, torch.bfloat16, True, False, 32),
        "packed": lambda: torch.ops._C.convert_weight_packed(codes),
    }
    handler, packed = packing["onednn"](), packing["packed"]()
    known: Row = {"matrix": name, "rows": num_rows, "columns": num_columns}
    found: list[Row] = [
        {"what": "pack", **known, "kernel": kernel, "ns_per_weight": 1e9 * seconds / codes.numel()}
        for kernel, seconds in in_turns(packing, repeats).items()
    ]
    for num_tokens in tokens:
        inputs = torch.randn(num_tokens, num_columns, generator=random).bfloat16()

        def by_onednn(inputs: torch.Tensor = inputs) -> torch.Tensor:
            rounded, input_scales, _ = ops.onednn_scaled_int8_quant(inputs, None, None, True)
            output = torch.empty((len(inputs), num_rows), dtype=inputs.dtype)
            ops.onednn_scaled_mm(handler, rounded, output, input_scales, None, None, None)
            return output

        def by_packed(inputs: torch.Tensor = inputs) -> torch.Tensor:
            product: torch.Tensor = torch.ops._C.int8_scaled_mm_with_quant(
                inputs, packed, scales, None, inputs.dtype, True
            )
            return product

        multiplying = {"onednn": by_onednn, "packed": by_packed}
        exact = inputs.float() @ (codes.float() * scales).t()
        found += [
            {
                **{"what": "multiply", **known, "tokens": num_tokens, "kernel": kernel, "us": 1e6 * seconds},
                "error": float((multiplying[kernel]() - exact).norm() / exact.norm()),
            }
            for kernel, seconds in in_turns(multiplying, repeats).items()
        ]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run all of it."""
    options = arguments("Packing and products of vLLM's INT8 kernels for CPUs.").parse_args(argv)
    torch.set_num_threads(1)
    current_platform.import_kernels()
    missing = ["several threads"]
    rows: list[Row] = []
    has_instructions = torch.cpu._is_vnni_supported() and torch.cpu._is_avx512_bf16_supported()
    if not has_instructions or not hasattr(torch.ops._C, "int8_scaled_mm_with_quant"):
        missing.append("anything: the packed kernel needs AVX-512 with VNNI and BF16")
    else:
        for name in list(SHAPES)[: 1 if options.quick else None]:
            rows += rows_of(name, TOKENS[: 3 if options.quick else None], 3 if options.quick else REPEATS)
    if not torch.cpu._is_amx_tile_supported():
        missing.append("AMX, where oneDNN has other kernels")
    write(options.json, rows=rows, not_measured=missing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
