"""Compiles functions with numba: without the interpreter's lock, once per installation.

numba caches machine code on disk: beside the source, in the home directory, or in NUMBA_CACHE_DIR. Where none can be
written, the cache is a folder of this user in the temporary directory.

The cache notices changes of the function's own file only, not of kernels from other files that were inlined. Every
`kernel` is therefore stamped with all files of the package that hold kernels, in every folder: a change of one file
recompiles all kernels. Other packages use `compiled`.

Only modules that hold kernels import this one. Importing numba before vLLM's CPU worker has initialised breaks the
registration of vLLM's operators, so code inside an engine imports these modules late.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from history.own_files import make_private_folder

CACHE_LINE = 64
"""Bytes."""

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", bound=npt.NDArray[Any])


def _stamp() -> tuple[tuple[str, int, int], ...]:
    package = Path(__file__).parent
    files = [file for file in sorted(package.rglob("*.py")) if b"history.jit" in file.read_bytes()]
    return tuple((file.relative_to(package).as_posix(), file.stat().st_mtime_ns, file.stat().st_size) for file in files)


_STAMP = _stamp()


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile `function` at its first call, or load it from the cache. It may call functions of its own file only.

    Division by zero behaves as in numpy.
    """
    typed: Callable[P, T] = _njit(function)
    return typed


def _njit(function: Callable[P, T], **options: bool) -> Any:  # noqa: ANN401
    """Numba's dispatcher, with a cache.

    Raises:
        PlantedError: numba finds no folder for its cache, and another user has made ours.
    """
    decorator = numba.njit(cache=True, nogil=True, error_model="numpy", **options)
    try:
        return decorator(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
    folder = Path(tempfile.gettempdir()) / f"mrl-numba-{os.geteuid()}"
    make_private_folder(folder)  # numba unpickles what lies there
    numba.config.CACHE_DIR = str(folder)
    return decorator(function)


def kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile `function` at its first call, or load it from the cache. Division by zero behaves as in numpy.

    The kernel is inlined into kernels that call it. Passing a state of thirty arrays (two hundred words) took a fifth
    of a draft's time.
    """
    dispatcher = _njit(function, forceinline=True)
    dispatcher._cache._cache_file._source_stamp = _STAMP
    typed: Callable[P, T] = dispatcher
    return typed


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_context: object, address: types.Integer) -> tuple[object, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: object, address: types.Integer) -> tuple[object, Callable[..., Any]]:
    """Prefetch the cache line at `address`. Only for kernels."""

    def generate(_: object, builder: Any, __: object, arguments: Any) -> Any:  # noqa: ANN401
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        line = builder.inttoptr(arguments[0], pointer)
        builder.call(function, [line, ir.Constant(number, 0), ir.Constant(number, 3), ir.Constant(number, 1)])
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(address), generate


@kernel
def int32s_at(address: int, shape: int | tuple[int, ...]) -> npt.NDArray[np.int32]:
    """View the int32[shape] at `address`, without a copy. Only for kernels; the caller keeps the memory alive."""
    view: npt.NDArray[np.int32] = numba.carray(_pointer(address), shape, np.int32)
    return view


@kernel
def borrowed(array: A) -> A:
    """View an array without reference counting, which costs more than reading. The caller keeps the array alive."""
    view: A = numba.carray(_pointer(array.ctypes.data), array.shape, array.dtype)
    return view


@kernel
def int64s_at(address: int, shape: int | tuple[int, ...]) -> npt.NDArray[np.int64]:
    """View the int64[shape] at `address`, as `int32s_at` does."""
    view: npt.NDArray[np.int64] = numba.carray(_pointer(address), shape, np.int64)
    return view


@kernel
def float32s_at(address: int, shape: int | tuple[int, ...]) -> npt.NDArray[np.float32]:
    """View the float32[shape] at `address`, as `int32s_at` does."""
    view: npt.NDArray[np.float32] = numba.carray(_pointer(address), shape, np.float32)
    return view


@kernel
def float64s_at(address: int, shape: int | tuple[int, ...]) -> npt.NDArray[np.float64]:
    """View the float64[shape] at `address`, as `int32s_at` does."""
    view: npt.NDArray[np.float64] = numba.carray(_pointer(address), shape, np.float64)
    return view
