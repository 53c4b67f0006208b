"""Compiles the stub libraries and names the environment in which programs use them.

Every function that a CUDA library of the environment has, and the sources here do not, gets a body that returns 0.
"""

import re
import subprocess
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parent
VERSIONS = {"cudart": "libcudart.so.13", "cublas": "libcublas.so.13", "cublasLt": "libcublasLt.so.13"}
"""Libraries with versioned symbols, and the version."""
USERS = (
    *("torch/lib/*.so", "vllm/*.so", "vllm/vllm_flash_attn/*.so", "transformer_engine/wheel_lib/*.so"),
    *("nvidia/cudnn/lib/*.so.9", "*transformer_engine_torch*.so"),
)
"""Libraries that call the driver."""
_DEFINED = re.compile(r"^\w[\w\s*]*?\b(\w+)\(", re.MULTILINE)
_LINKERS = {"_init", "_fini"}
"""Symbols that the linker adds itself."""
NVIDIA_SMI = """#!/bin/sh
query=$(echo "$*" | grep -o 'query-gpu=[a-z._]*' | cut -d= -f2)
for number in $(seq 0 $((${FAKE_GPUS:-8} - 1))); do
  case $query in name) echo "NVIDIA H100 80GB HBM3";; index) echo "$number, GPU-$number, 81559, [N/A], 9.0";; esac
done
"""


def build(target: Path) -> None:
    """Compile all libraries into `target`, for the packages of the running interpreter. Needs gcc and nm."""
    site = Path(sysconfig.get_path("purelib"))
    target.mkdir(parents=True, exist_ok=True)
    _generate(site, target)
    for name in (*VERSIONS, "cuda", "nccl", "nvml"):
        _compile(name, site / "nvidia" / "cu13" / "include", target)
    programs = target / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "nvidia-smi").write_text(NVIDIA_SMI, encoding="utf-8")
    (programs / "nvidia-smi").chmod(0o755)


def environment(
    target: Path, *, num_devices: int, path: str, reuses_memory: bool = False, computes: bool = False
) -> dict[str, str]:
    """Variables of a program that sees `num_devices` devices; `path` is its PATH.

    With `reuses_memory` torch keeps freed memory, so that a new tensor holds what an earlier one has left. With
    `computes` kernels have results (`twins`).
    """
    preloaded = ("libcuda.so.1", *VERSIONS.values(), "libnccl.so.2")
    return {
        "FAKE_GPUS": str(num_devices),
        "LD_PRELOAD": ":".join(str(target / name) for name in preloaded),
        "LD_LIBRARY_PATH": str(target),
        "TRITON_LIBCUDA_PATH": str(target),
        "PATH": f"{target / 'bin'}:{path}",
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # memory of a new allocation is zero, as no kernel fills it
        **({} if reuses_memory else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        **({"STUB_CUDA_COMPUTES": "1", "TRITON_INTERPRET": "1"} if computes else {}),
    }


def _generate(site: Path, target: Path) -> None:
    """Write the bodies that return 0, and the maps of symbol versions."""
    toolkit = site / "nvidia" / "cu13"
    real = {name: _symbols(toolkit / "lib" / file, defined=True) for name, file in VERSIONS.items()}
    real["nccl"] = _symbols(site / "nvidia" / "nccl" / "lib" / "libnccl.so.2", defined=True)
    used = {name for pattern in USERS for path in site.glob(pattern) for name in _symbols(path, defined=False)}
    header = (toolkit / "include" / "cuda.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", header))
    real["cuda"] = declared | {name for name in used if re.match(r"cu[A-Z]", name) and not name.startswith("cuFile")}
    for name, symbols in real.items():
        own = set(_DEFINED.findall((SOURCES / f"{name}.c").read_text(encoding="utf-8")))
        missing = sorted(symbol for symbol in symbols - own - _LINKERS if re.fullmatch(r"[A-Za-z_]\w*", symbol))
        lines = ["extern int fake_trace(const char *);", *map(_body, missing)]
        (target / f"{name}_rest.c").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if name in VERSIONS:
            (target / f"{name}.map").write_text(f"{VERSIONS[name]} {{ global: *; }};\n", encoding="utf-8")


def _body(symbol: str) -> str:
    trace = f'static int once; if (!once) {{ once = 1; fake_trace("{symbol}"); }}'
    return f"long {symbol}(void) {{ {trace} return 0; }}"


def _symbols(library: Path, *, defined: bool) -> set[str]:
    option = "--defined-only" if defined else "--undefined-only"
    listed = subprocess.run(["nm", "-D", option, library], capture_output=True, text=True, check=False).stdout
    rows = [line.split() for line in listed.splitlines()]
    return {row[-1].partition("@")[0] for row in rows if not defined or row[1] in "TtWi"}


def _compile(name: str, include: Path, target: Path) -> None:
    file = VERSIONS.get(
        name, {"cuda": "libcuda.so.1", "nccl": "libnccl.so.2", "nvml": "libnvidia-ml.so.1"}.get(name, "")
    )
    rest = [] if name == "nvml" else [str(target / f"{name}_rest.c")]
    versions = [f"-Wl,--version-script,{target / name}.map"] if name in VERSIONS else []
    command = ["gcc", f"-I{include}", "-w", "-fPIC", "-shared", "-O1", "-o", str(target / file)]
    subprocess.run([*command, str(SOURCES / f"{name}.c"), *rest, f"-Wl,-soname,{file}", *versions, "-ldl"], check=True)
