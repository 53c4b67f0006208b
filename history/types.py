"""Finished responses, names of prompts and folders, and what is told to the history's actors.

Per-token data are numpy arrays of int32 ids. Ids are never negative: an index uses negative numbers as separators.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastResponse:
    """One finished response of a prompt."""

    token_ids: TokenIds
    """[T], with the end-of-sequence token if it was sampled."""
    step: int
    """Step that sampled the response."""
    sample: int
    """Number of the response among all that the step sampled for the prompt."""
    reward: float = math.nan
    """NaN until the response is scored, and for ever if the scoring failed."""


def prompt_key(prompt_id: str) -> int:
    """Return the prompt's key in every index, file name and request: 63 bits, equal on all runs and machines."""
    return xxhash.xxh3_64_intdigest(prompt_id.encode()) >> 1


def folder_of_node(directory: str, node_id: str) -> str:
    """Name of the folder in which a node's reader publishes; `node_id` is Ray's, `directory` the same on all nodes."""
    return f"{directory}-{node_id[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorProcess:
    """The process of a shard or a reader."""

    node_id: str
    """Ray's id of its node."""
    pid: int
    start_ticks: int
    """Its start, as `history.process_stat` reads it; process ids are used again."""
    host: str = ""
    """Name of its machine, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPlaces:
    """Nodes of the history's actors, all by name or all by Ray's id."""

    shards: tuple[str, ...]
    """Node of each shard."""
    readers: tuple[str, ...]
    """Nodes with a reader."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Epoch:
    """Prompts of which each returns once in an epoch: those of a data set."""

    prompt_keys: npt.NDArray[np.int64]
    """[P]"""
    num_steps: int
    """Steps of an epoch, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOrder:
    """The keys of all prompts whose segments a reader publishes; it removes all others."""

    kept: tuple[int, ...] = ()
    """Prompts that may be in use: their segments stay as they are, and missing ones are built. They come first."""
    fresh: tuple[int, ...] = ()
    """Prompts of the next groups: their newest segments are published."""

    @property
    def keys(self) -> frozenset[int]:
        """All prompts."""
        return frozenset((*self.kept, *self.fresh))
