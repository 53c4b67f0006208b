"""What nobody who copies can do better: every forward, the longest piece of text that exists and turns out to be right.

The text is that of the drafter: what the prompt's last visit said, and what it and its siblings have said so far. Which
place continues rightly is known beforehand, so pieces of one or two tokens that are right by chance count, too.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from benchmarks.compiled import compiled
from benchmarks.draft_quality import K, by_prompt
from benchmarks.record import Row
from history.traces import Trace
from history.types import TokenIds

_BY_CHANCE = 2
"""Tokens of a piece up to which it may be right without any context that says so."""


def bound_row(case: str, visit: int, old: Sequence[Trace], new: Sequence[Trace], max_draft_tokens: int = K) -> Row:
    """Tokens a forward if every draft were the best piece; also if none had been right by chance."""
    past = {prompt_id: [trace.response_ids for trace in traces] for prompt_id, traces in by_prompt(old)}
    counts = np.zeros(max_draft_tokens + 1, dtype=np.int64)
    for prompt_id, traces in by_prompt(new):
        counts += count_drafts(past.get(prompt_id, []), [trace.response_ids for trace in traces], max_draft_tokens)
    accepted = np.arange(len(counts))
    return {
        "what": "bound",
        "case": case,
        "visit": visit,
        "tokens_per_forward": round(1.0 + float((counts * accepted).sum() / counts.sum()), 4),
        "without_chance": round(1.0 + float((counts * accepted)[_BY_CHANCE + 1 :].sum() / counts.sum()), 4),
    }


def count_drafts(
    past: Sequence[TokenIds], responses: Sequence[TokenIds], max_draft_tokens: int
) -> npt.NDArray[np.int64]:
    """How many forwards accept 0, 1, .. `max_draft_tokens` tokens, int64 [max_draft_tokens + 1].

    All responses of a prompt emit at once, what they drafted and one token more; the last token is never drafted.
    """
    text = np.concatenate(list(_separated([*past, *responses])))
    sizes = np.array([len(response) for response in responses], dtype=np.int64)
    begins = len(text) - np.cumsum((sizes + 1)[::-1])[::-1]
    return _count(text, int(begins[0]), begins, sizes, max_draft_tokens)


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
) -> npt.NDArray[np.int64]:
    counts = np.zeros(max_draft_tokens + 1, dtype=np.int64)
    emitted = np.zeros(len(begins), dtype=np.int64)
    while (emitted < sizes).any():
        known = emitted.copy()
        for row in range(len(begins)):
            if known[row] == sizes[row]:
                continue
            at = begins[row] + known[row]
            most = min(max_draft_tokens, sizes[row] - known[row] - 1)
            best = _longest(text, 0, num_past, at, most, 0)
            for other in range(len(begins)):
                best = _longest(text, begins[other], begins[other] + known[other], at, most, best)
            counts[best] += 1
            emitted[row] += best + 1
    return counts


@compiled
def _longest(text: TokenIds, begin: int, end: int, at: int, most: int, best: int) -> int:
    """Tokens of the longest piece of text[begin:end] that text[at:] begins with, at least `best`, at most `most`."""
    for start in range(begin, end):
        if best >= most:
            return best
        if text[start] != text[at] or start + best >= end or text[start + best] != text[at + best]:
            continue
        length = 1
        while length < most and start + length < end and text[start + length] == text[at + length]:
            length += 1
        best = max(best, length)
    return best
