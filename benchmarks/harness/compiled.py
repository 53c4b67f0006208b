"""`compiled`: numba's decorator with types, for functions that call compiled functions of the same file only.

Numba's cache does not notice changes of compiled functions in other files.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, compiled at its first call or loaded from the cache."""
    typed: Callable[P, T] = numba.njit(cache=True, nogil=True)(function)
    return typed
