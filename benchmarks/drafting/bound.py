"""Upper bound for drafters that copy: an oracle drafts the longest correct span of the known text in every forward.

The known text is the drafter's: the responses of the prompt's last visit, and the tokens that the response and its
siblings have emitted. The oracle knows which span is correct, so spans of one or two tokens that are right by chance
count too.

With a context, the oracle may only use a span that a drafter could find. Either the `context` tokens before the span
match the last tokens of the response, or the span lies within the drafter's realignment range of the last copied place.
The oracle always takes the longest span; with a context it is not proven that a shorter one never gains.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from benchmarks.drafting.quality import K, by_prompt
from benchmarks.harness.compiled import compiled
from benchmarks.harness.record import Row
from history.drafting.realign import REACH
from history.store.traces import Trace
from history.types import TokenIds

_BY_CHANCE = 2
"""Length in tokens up to which a span may be right by chance."""


def bound_row(
    case: str, visit: int, old: Sequence[Trace], new: Sequence[Trace], max_draft_tokens: int = K, *, context: int = 0
) -> Row:
    """Tokens per forward if every draft were the longest correct span, with and without spans of one or two tokens.

    `context`: number of tokens before a span that must match, unless it is near the last one; 0: any span.
    """
    past = {prompt_id: [trace.response_ids for trace in traces] for prompt_id, traces in by_prompt(old)}
    counts = np.zeros(max_draft_tokens + 1, dtype=np.int64)
    for prompt_id, traces in by_prompt(new):
        responses = [trace.response_ids for trace in traces]
        counts += count_drafts(past.get(prompt_id, []), responses, max_draft_tokens, context=context)
    accepted = np.arange(len(counts))
    return {
        "what": "bound",
        "case": case,
        "visit": visit,
        "context": context,
        "tokens_per_forward": round(1.0 + float((counts * accepted).sum() / counts.sum()), 4),
        "without_chance": round(1.0 + float((counts * accepted)[_BY_CHANCE + 1 :].sum() / counts.sum()), 4),
    }


def count_drafts(
    past: Sequence[TokenIds], responses: Sequence[TokenIds], max_draft_tokens: int, *, context: int = 0
) -> npt.NDArray[np.int64]:
    """Number of forwards that accept 0, 1, .. `max_draft_tokens` tokens, int64 [max_draft_tokens + 1].

    All responses of a prompt decode together. Each emits its draft and one more token; the last token is not drafted.
    """
    text = np.concatenate(list(_separated([*past, *responses])))
    sizes = np.array([len(response) for response in responses], dtype=np.int64)
    begins = len(text) - np.cumsum((sizes + 1)[::-1])[::-1]
    return _count(text, int(begins[0]), begins, sizes, max_draft_tokens, context)


def _separated(texts: Sequence[TokenIds]) -> Iterator[TokenIds]:
    separator = np.full(1, -1, dtype=np.int32)
    return chain.from_iterable((text, separator) for text in texts)


@compiled
def _count(
    text: TokenIds,
    num_past: int,
    begins: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    max_draft_tokens: int,
    context: int,
) -> npt.NDArray[np.int64]:
    counts = np.zeros(max_draft_tokens + 1, dtype=np.int64)
    emitted = np.zeros(len(begins), dtype=np.int64)
    cursors = np.full(len(begins), -1, dtype=np.int64)
    while (emitted < sizes).any():
        known = emitted.copy()
        for row in range(len(begins)):
            if known[row] == sizes[row]:
                continue
            at = begins[row] + known[row]
            most = min(max_draft_tokens, sizes[row] - known[row] - 1)
            cursor = cursors[row]
            best, place = _longest(text, 0, num_past, at, most, 0, -1, context, cursor)
            for other in range(len(begins)):
                end = begins[other] + known[other]
                best, place = _longest(text, begins[other], end, at, most, best, place, context, cursor)
            counts[best] += 1
            emitted[row] += best + 1
            if place >= 0:
                cursors[row] = place + best
            cursors[row] += cursors[row] >= 0  # as if the token after the span had been replaced
    return counts


@compiled
def _longest(
    text: TokenIds, begin: int, end: int, at: int, most: int, best: int, place: int, context: int, cursor: int
) -> tuple[int, int]:
    """Length, at most `most`, and start of the longest span of text[begin:end] with which text[at:] begins.

    `best` and `place` are those of other texts; they are returned if no span here is longer.
    """
    for start in range(begin, end):
        if best >= most:
            break
        if text[start] != text[at] or start + best >= end or text[start + best] != text[at + best]:
            continue
        if context > 0 and (cursor < 0 or abs(start - cursor) > REACH) and not _is_found(text, start, at, context):
            continue
        length = 1
        while length < most and start + length < end and text[start + length] == text[at + length]:
            length += 1
        if length > best:
            best, place = length, start
    return best, place


@compiled
def _is_found(text: TokenIds, start: int, at: int, context: int) -> bool:
    """Whether the `context` tokens before both places are equal; the start of a response counts as a token."""
    for i in range(1, context + 1):
        if text[start - i] != text[at - i]:
            return False
        if text[start - i] < 0:
            return True
    return True
