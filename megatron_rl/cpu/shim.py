"""Makes `megatron.core` run on a machine without CUDA.

Megatron names the device in its sources (`device="cuda"`, `torch.cuda.current_device()`, `.cuda()`). Patching torch
would affect its other users. Instead, an import hook compiles the sources of `megatron.core` that mention CUDA with the
device renamed:

    "cuda"                    -> "cpu"
    "torch.cuda.HalfTensor"   -> "torch.HalfTensor"      (names of tensor types)
    torch.cuda.x              -> megatron_rl.cpu.device.x
    t.cuda(...)               -> t.cpu()
    pin_memory=True           -> pin_memory=False

Some things cannot be renamed and are replaced after a module has run (`_AFTER`):

* the generator state, which Megatron gets from C++ symbols that CUDA builds of torch have even without a device;
* `torch.compile` as Megatron's fuser, which on a CPU compiles for minutes to save microseconds;
* parts of expert routing: Transformer Engine's matrix product, which Megatron looks up without importing it, and sizes
  that become numbers only when they are copied from a device.

Invariants: nothing happens if CUDA is available. No Megatron module may be imported before (refused otherwise).
Compiled code is cached beside Python's own under another name, so that neither kind of process reads the other's cache.
"""

import ast
import importlib.machinery
import importlib.util
import marshal
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

import torch

from megatron_rl.cpu import device

_PACKAGE = "megatron.core"
_CACHE_TAG = "mrlcpu2"
"""Part of the cached files' names; must change with the renaming rules."""

_TENSOR_TYPE = re.compile(r"torch\.cuda\.(\w+Tensor)")


def install() -> None:
    """Make later imports of `megatron.core` use the CPU; does nothing if CUDA is available.

    Must be the first thing a trainer process does. A second call does nothing.

    Raises:
        RuntimeError: `megatron.core` is already imported and expects CUDA.
    """
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError(
            f"{_PACKAGE} was imported before the CPU shim and expects a CUDA device; "
            "call megatron_rl.cpu.shim.install() before anything that imports Megatron"
        )
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds `megatron.core` and its modules as Python does, and sets the loader of this file."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Spec of a Megatron module; None for everything else."""
        if name != _PACKAGE and not name.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a source that mentions CUDA with the device renamed; leaves others to Python."""

    def get_code(self, fullname: str) -> CodeType | None:
        source = Path(self.path).read_bytes()
        return _compiled(source, Path(self.path)) if b"cuda" in source else super().get_code(fullname)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if after := _AFTER.get(module.__name__):
            after(module)


def _use_cpu_generator(module: ModuleType) -> None:
    vars(module)["_get_cuda_rng_state"] = device.get_megatron_rng_state
    vars(module)["_set_cuda_rng_state"] = device.set_megatron_rng_state


def _disable_fuser(module: ModuleType) -> None:
    module.disable_jit_fuser()


def _route_on_cpu(module: ModuleType) -> None:
    vars(module)["te_general_gemm"] = None
    vars(module)["maybe_move_tensor_to_cpu"] = _sizes_for_collectives


def _sizes_for_collectives(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Sizes for an all-to-all, as numbers; Megatron converts only tensors that it copies from a device."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _disable_fuser,
    "megatron.core.tensor_parallel.random": _use_cpu_generator,
    "megatron.core.transformer.moe.moe_utils": _route_on_cpu,
}


def _compiled(source: bytes, path: Path) -> CodeType:
    """Renamed code of `source`; from the cache if the cache is of the same interpreter and source."""
    key = importlib.util.MAGIC_NUMBER + importlib.util.source_hash(source)
    cache = Path(importlib.util.cache_from_source(str(path), optimization=_CACHE_TAG))
    try:
        cached = cache.read_bytes()
    except OSError:
        cached = b""
    if cached.startswith(key):
        code: CodeType = marshal.loads(cached[len(key) :])
        return code
    code = compile(renamed(source.decode(), str(path)), str(path), "exec", dont_inherit=True)
    _store(cache, key + marshal.dumps(code))
    return code


def _store(cache: Path, data: bytes) -> None:
    """Write under a temporary name, because ranks start at the same time; a read-only directory is no error."""
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        cache.parent.mkdir(exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(cache)
    except OSError:
        temporary.unlink(missing_ok=True)


def renamed(source: str, filename: str) -> ast.Module:
    """Syntax tree of `source` with every mention of the CUDA device renamed as in the file's docstring."""
    tree = ast.parse(source, filename)
    _Rename().visit(tree)
    place = 0
    while place < len(tree.body) and _must_stay_first(tree.body[place]):
        place += 1
    stand_in = ast.Import(names=[ast.alias(name=device.__name__, asname="_torch_cuda")])
    tree.body.insert(place, stand_in)
    return ast.fix_missing_locations(tree)


def _must_stay_first(statement: ast.stmt) -> bool:
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


class _Rename(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        if node.value in ("cuda", "cuda:0"):
            return ast.copy_location(ast.Constant("cpu"), node)
        if match := _TENSOR_TYPE.fullmatch(node.value):
            return ast.copy_location(ast.Constant(f"torch.{match[1]}"), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name("_torch_cuda", node.ctx), node)
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda" and node.level == 0:
            node.module = device.__name__
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == "pin_memory":
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr, node.args, node.keywords = "cpu", [], []
        return node
