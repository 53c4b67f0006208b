"""Past responses of many prompts as six arrays, for transfer between processes and into files.

One object replaces thousands: serialising each small object costs about a millisecond.

Invariant: `lengths` sum to the number of tokens; the arrays of a decoded batch are read-only views.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from history.types import PastResponse, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseBatch:
    """R responses, one after another. Responses of one prompt need not be neighbours."""

    prompt_keys: npt.NDArray[np.int64]
    """[R]"""
    steps: npt.NDArray[np.int32]
    """[R]"""
    samples: npt.NDArray[np.int32]
    """[R]"""
    rewards: npt.NDArray[np.float64]
    """[R]; NaN until scored."""
    lengths: npt.NDArray[np.int64]
    """[R]"""
    token_ids: TokenIds
    """[sum of lengths]"""

    @classmethod
    def of(cls, entries: Iterable[tuple[int, PastResponse]]) -> "ResponseBatch":
        """Join (prompt key, response) pairs; copies the tokens."""
        pairs = list(entries)
        responses = [response for _, response in pairs]
        parts = [response.token_ids for response in responses] or [np.zeros(0, dtype=np.int32)]
        return cls(
            prompt_keys=np.array([key for key, _ in pairs], dtype=np.int64),
            steps=np.array([response.step for response in responses], dtype=np.int32),
            samples=np.array([response.sample for response in responses], dtype=np.int32),
            rewards=np.array([response.reward for response in responses], dtype=np.float64),
            lengths=np.array([len(response.token_ids) for response in responses], dtype=np.int64),
            token_ids=np.concatenate(parts, dtype=np.int32),
        )

    @property
    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """All arrays in the order of the constructor."""
        return (self.prompt_keys, self.steps, self.samples, self.rewards, self.lengths, self.token_ids)

    def __len__(self) -> int:
        return len(self.prompt_keys)

    def entries(self) -> Iterator[tuple[int, PastResponse]]:
        """Yield (prompt key, response) pairs in order; tokens are views."""
        ends = np.cumsum(self.lengths).tolist()
        columns = (self.prompt_keys, self.steps, self.samples, self.rewards, self.lengths)
        rows = zip(*(column.tolist() for column in columns), ends, strict=True)
        for key, step, sample, reward, length, end in rows:
            token_ids = self.token_ids[end - length : end]
            yield key, PastResponse(token_ids=token_ids, step=step, sample=sample, reward=reward)

    def by_prompt(self) -> dict[int, list[PastResponse]]:
        """Group the responses by prompt, in the order in which prompts appear."""
        by_key: dict[int, list[PastResponse]] = {}
        for key, response in self.entries():
            by_key.setdefault(key, []).append(response)
        return by_key

    def split(self, num_shards: int) -> list["ResponseBatch"]:
        """Split the batch by shard: a prompt belongs to shard `key % num_shards`."""
        if num_shards == 1:
            return [self]
        parts: list[list[tuple[int, PastResponse]]] = [[] for _ in range(num_shards)]
        for key, response in self.entries():
            parts[key % num_shards].append((key, response))
        return [ResponseBatch.of(part) for part in parts]
