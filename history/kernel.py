"""How functions of the history are compiled: numba, without the interpreter's lock, once per installation.

numba caches machine code on disk and notices only changes of the file that a function stands in, not of
kernels in other files that were compiled into it. Here every kernel is stamped with all sources of this
package, so a change of any of them compiles again.

Imported only by modules that hold kernels: numba must not be imported before vLLM's CPU worker has
initialised (it breaks the registration of its operators), so whoever drafts inside an engine imports
them late.
"""

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
T = TypeVar("T")


def kernel(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, compiled at its first call or loaded from the cache."""
    compiled = njit(cache=True, nogil=True)(function)
    compiled._cache._cache_file._source_stamp = _STAMP
    typed: Callable[P, T] = compiled
    return typed


def _stamp() -> tuple[tuple[str, int, int], ...]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


_STAMP = _stamp()
