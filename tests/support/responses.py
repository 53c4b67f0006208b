"""Responses whose tokens encode their origin, so that a misplaced token is detected."""

import numpy as np

from history.types import PastResponse


def token_ids(key: int, step: int, sample: int, length: int) -> np.ndarray:
    return ((key % 50_000 * 7919 + step * 101 + sample * 13 + np.arange(length)) % 50_000).astype(np.int32)


def response(key: int, step: int, sample: int, *, length: int = 12, reward: float = float("nan")) -> PastResponse:
    return PastResponse(token_ids=token_ids(key, step, sample, length), step=step, sample=sample, reward=reward)


def visit(key: int, step: int, *, num_samples: int = 4, length: int = 12) -> list[PastResponse]:
    return [response(key, step, sample, length=length) for sample in range(num_samples)]


def is_right(key: int, found: PastResponse) -> bool:
    return np.array_equal(found.token_ids, token_ids(key, found.step, found.sample, len(found.token_ids)))
