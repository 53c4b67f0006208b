"""What the history knows of: tokens of finished responses, and how to name a prompt.

Per-token data are numpy arrays: int32 ids, never negative (negative numbers separate responses inside
an index).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastResponse:
    """One finished response of a prompt, as the history keeps it."""

    token_ids: TokenIds
    """[T], end-of-sequence token included when it was sampled."""
    step: int
    """Step that it was sampled for."""
    sample: int
    """Index within its group."""
    reward: float = math.nan
    """NaN until it has been scored."""


def prompt_key(prompt_id: str) -> int:
    """A prompt's key in every index, file name and request: 63 bits, stable over runs and machines."""
    return xxhash.xxh3_64_intdigest(prompt_id.encode()) >> 1
