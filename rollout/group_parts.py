"""The tokens of a group as several objects of the object store: a trainer rank fetches those that it trains on.

A part holds consecutive responses. A part that is one of several has at least `LEAST_PART_TOKENS` tokens, because Ray
sends a result below 100 KiB to the owner, the controller, which must hold no tokens. So a long response is a part of
its own, and a group of short ones is one part. The lengths of the responses alone decide the parts: whoever has the
group's summary knows which handle holds which response.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rollout.types import GroupColumns, PromptGroup

LEAST_PART_TOKENS = 12_288
"""At 9 bytes a token (id, log-probability, flag) more than Ray's `max_direct_call_object_size` of 102,400 bytes."""


def part_numbers(lengths: Sequence[int]) -> tuple[int, ...]:
    """The number of the part that holds each response, ascending from 0; `lengths` are tokens of the responses."""
    numbers = []
    number = held = 0
    left = sum(lengths)
    for length in lengths:
        if held >= LEAST_PART_TOKENS and left >= LEAST_PART_TOKENS:
            number, held = number + 1, 0
        numbers.append(number)
        held += length
        left -= length
    return tuple(numbers)


def num_parts(lengths: Sequence[int]) -> int:
    """Parts of a group whose responses have these lengths."""
    return part_numbers(lengths)[-1] + 1


def most_parts(group: PromptGroup) -> int:
    """Parts that a group has at most: known before it is sampled, as Ray needs the number of results of a call."""
    size = len(group.seeds)
    return min(size, max(1, size * group.sampling.max_response_tokens // LEAST_PART_TOKENS))


def split(columns: GroupColumns) -> list[GroupColumns]:
    """The parts of a whole group, as views."""
    numbers = part_numbers(np.diff(columns.offsets).tolist())
    edges = [*(numbers.index(number) for number in range(numbers[-1] + 1)), len(numbers)]
    return [_part(columns, first, behind) for first, behind in pairwise(edges)]


def joined(parts: Sequence[GroupColumns]) -> GroupColumns:
    """The whole group of its parts, in order; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    begins = np.cumsum([0, *(len(part.response_ids) for part in parts)])
    offsets = [part.offsets[:-1] + begin for part, begin in zip(parts, begins[:-1], strict=True)]
    return GroupColumns(
        prompt_ids=parts[0].prompt_ids,
        response_ids=np.concatenate([part.response_ids for part in parts]),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        resampled=np.concatenate([part.resampled for part in parts]),
        offsets=np.concatenate([*offsets, begins[-1:]]),
    )


def _part(columns: GroupColumns, first: int, behind: int) -> GroupColumns:
    """Responses `first` up to `behind` of a whole group."""
    begin, end = columns.offsets[first], columns.offsets[behind]
    return GroupColumns(
        prompt_ids=columns.prompt_ids,
        response_ids=columns.response_ids[begin:end],
        rollout_logprobs=columns.rollout_logprobs[begin:end],
        resampled=columns.resampled[begin:end],
        offsets=columns.offsets[first : behind + 1] - begin,
        first=first,
    )
