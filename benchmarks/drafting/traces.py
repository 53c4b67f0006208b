"""Generated responses over epochs: each copies an old response of its prompt, with the edits of a changing policy.

A response copies spans of lognormal length (sigma 1.2, heavy-tailed) from a response of the epoch before. Spans end in
substitutions (40 %), insertions (20 %), deletions (15 %) and jumps to a sibling at a matching token (25 %). Half of all
edits are *systematic*, like a shift of the policy: the tokens before an edit decide whether and how it happens, so all
siblings make the same edit. The other half differ between responses. Responses of epoch 0 copy in the same way from
hidden texts, so siblings resemble each other.

*Reuse* is the share of a response's tokens that were copied. With reuse 0 all responses are independent. Rewards are
random, so responses with a high reward are not reused more.

EDIT_TOKENS alone sets the gain of drafting. It was chosen so that Arctic Inference 0.3.0 with vLLM's defaults and 16
draft tokens emits about 4.6, 3.1 and 2.1 tokens per forward. These are for reuse 93, 87 and 76 % at 2k tokens.
FIRST_REUSE was chosen so that Arctic with one tree per prompt and factor 4 emits about 1.7 in epoch 0, from siblings
alone. Both must not change: every record on these traces depends on them. They were chosen on `CALIBRATION_SEED`, so
records use that seed only to choose settings of peers.

The same arguments give the same traces, on every machine; epoch 0 does not depend on `reuse`.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.harness.compiled import compiled
from history.store.traces import Trace
from history.types import TokenIds

CALIBRATION_SEED = 0
SIBLINGS = 8
VOCABULARY = 32_000
END_OF_SEQUENCE = 0
PROMPT_TOKENS = 64
SIGMA = 1.2
"""Sigma of the lognormal lengths of copied spans."""
EDIT_TOKENS = 1.75
"""Mean tokens of an edit (frozen, see above)."""
SHORTEST_SPAN = 4.0
"""Least mean length of a span in tokens; below it, edits get longer instead."""
FIRST_REUSE = 0.9
"""Share of a response of epoch 0 that is copied from a hidden text."""
HIDDEN_TEXTS = 2
PROMPT_LENGTH_SIGMA, SAMPLE_LENGTH_SIGMA, EPOCH_LENGTH_SIGMA = 0.25, 0.1, 0.05
"""Spread of log lengths over prompts, within a group, and from epoch to epoch."""

SUBSTITUTION, INSERTION, DELETION, JUMP = range(4)
KIND_LIMITS = np.array([0.4, 0.6, 0.75, 1.0])
"""Cumulative shares of the kinds of edits."""
_NOVEL_PER_EDIT = 0.6
"""Share of edits that add new tokens."""

_FAMILIAR = 0.5
"""Share of new tokens that are one of a few frequent successors of the token before."""

Longs = npt.NDArray[np.int64]
State = npt.NDArray[np.uint64]
"""[1] state of a generator (splitmix64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Generated traces with their reuse."""

    traces: list[Trace]
    """Ordered by epoch (their step), prompt, sample."""
    reuse: float
    """Share of the tokens after epoch 0 that were copied."""


def generate(
    *, reuse: float, num_tokens: int, num_prompts: int, num_epochs: int = 2, num_siblings: int = SIBLINGS, seed: int = 0
) -> Generated:
    """Responses of about `num_tokens` tokens whose share `reuse` (0 to .95) comes from the epoch before."""
    if not 0.0 <= reuse <= 0.95:
        raise ValueError(f"reuse {reuse}: must lie between 0 and 0.95")
    traces: list[Trace] = []
    copied, total = 0, 0
    for prompt in range(num_prompts):
        draws = np.random.default_rng((seed, prompt))
        state = draws.integers(1 << 63, size=1, dtype=np.uint64)
        prompt_ids = fresh(PROMPT_TOKENS, state)
        mean = num_tokens * draws.lognormal(0.0, PROMPT_LENGTH_SIGMA)
        lengths = mean * draws.lognormal(0.0, SAMPLE_LENGTH_SIGMA, size=num_siblings)
        hidden = [fresh(int(1.5 * mean), state) for _ in range(HIDDEN_TEXTS)]
        group, _ = _next_group(hidden, lengths, FIRST_REUSE, state, systematic=False)
        for epoch in range(num_epochs):
            if epoch:
                lengths = lengths * draws.lognormal(0.0, EPOCH_LENGTH_SIGMA, size=num_siblings)
                group, num_copied = _next_group(group, lengths, reuse, state, systematic=True)
                copied += num_copied
                total += sum(len(response) for response in group)
            rewards = draws.integers(2, size=num_siblings)
            traces += [
                Trace(
                    step=epoch,
                    prompt_id=f"prompt-{seed}-{prompt}",
                    sample=sample,
                    prompt_ids=prompt_ids,
                    response_ids=response,
                    reward=float(rewards[sample]),
                )
                for sample, response in enumerate(group)
            ]
    return Generated(traces=sorted(traces, key=lambda trace: trace.step), reuse=copied / max(total, 1))


def _next_group(
    old: list[TokenIds], lengths: npt.NDArray[np.float64], reuse: float, state: State, *, systematic: bool
) -> tuple[list[TokenIds], int]:
    """Responses of `lengths` tokens copied from `old`, and the number of copied tokens."""
    sizes = [max(int(length), 16) for length in lengths]
    if reuse == 0.0:
        return [_ended(fresh(size, state)) for size in sizes], 0
    odds = reuse / (1.0 - reuse)
    edit_tokens = max(EDIT_TOKENS, SHORTEST_SPAN / (_NOVEL_PER_EDIT * odds))
    span = odds * _NOVEL_PER_EDIT * edit_tokens
    if systematic:
        # two kinds of edits, each half as frequent; the factor for their overlap was fitted
        span *= 2.0 * (1.15 + 0.02 * odds)
    mu = math.log(span) - SIGMA**2 / 2.0
    old = [np.append(response[response != END_OF_SEQUENCE], np.int32(-1)) for response in old]
    text = np.concatenate(old)
    starts = np.cumsum([0, *(len(response) for response in old)])
    seed = int(state[0] >> np.uint64(1))
    rules = _rules(text, mu, seed) if systematic else np.zeros(0, dtype=np.int64)
    responses, copied = [], 0
    for sample, size in enumerate(sizes):
        out = np.empty(size, dtype=np.int32)
        copied += _edited(text, starts, sample % len(old), rules, seed, mu, edit_tokens, state, out)
        responses.append(_ended(out))
    return responses, copied


def _ended(response: TokenIds) -> TokenIds:
    response[-1] = END_OF_SEQUENCE
    return response


@compiled
def _uniform(state: State) -> float:
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled
def _normal(state: State) -> float:
    radius = math.sqrt(-2.0 * math.log(1.0 - _uniform(state)))
    return radius * math.cos(2.0 * math.pi * _uniform(state))


@compiled
def _span(mu: float, state: State) -> int:
    """Tokens of a copied span, at least one."""
    return max(1, int(math.exp(mu + SIGMA * _normal(state)) + 0.5))


@compiled
def _geometric(mean: float, state: State) -> int:
    """A geometric number from 1 on, with this mean."""
    if mean <= 1.0:
        return 1
    return 1 + int(math.log(1.0 - _uniform(state)) / math.log(1.0 - 1.0 / mean))


@compiled
def _mixed(first: int, second: int, third: int) -> int:
    mixed = np.uint64(first) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(second + 7)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(third + 7)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return np.int64(mixed >> np.uint64(1))  # type: ignore[return-value]


@compiled
def _novel(before: int, state: State) -> int:
    """A new token: by Zipf's law from the whole vocabulary, or one of a few frequent successors of `before`."""
    rank = int(math.exp(_uniform(state) * math.log(VOCABULARY - 1)))
    if _uniform(state) < _FAMILIAR:
        rank = 1 + _mixed(before, rank % 8, 0) % (VOCABULARY - 1)
    return rank


@compiled
def fresh(num_tokens: int, state: State) -> TokenIds:
    """A text of new tokens."""
    text = np.empty(num_tokens, dtype=np.int32)
    before = 0
    for i in range(num_tokens):
        before = _novel(before, state)
        text[i] = before
    return text


@compiled
def _key(text: TokenIds, position: int) -> int:
    """Hash of the five tokens before `position`, which decide a systematic edit; -1 near the start."""
    if position < 5:
        return -1
    near: int = _mixed(text[position - 1], text[position - 2], text[position - 3])
    return _mixed(near, text[position - 4], text[position - 5])


@compiled
def _rules(text: TokenIds, mu: float, seed: int) -> Longs:
    """Hash table (open addressing, -1: empty) of the keys at which systematic edits happen.

    The edits divide the old texts into spans of lognormal length. Each key determines the distance to the next edit, so
    siblings with equal text are edited at the same places.
    """
    size = 1 << int(math.log2(len(text)) + 2)
    table = np.full(size, -1, dtype=np.int64)
    keyed = np.array([seed], dtype=np.uint64)
    left = _span(mu, keyed)
    for position in range(len(text)):
        left -= 1
        key = _key(text, position)
        if key < 0:
            continue
        where = key & (size - 1)
        while table[where] >= 0 and table[where] != key:
            where = (where + 1) & (size - 1)
        if table[where] == key or left <= 0:
            table[where] = key
            keyed[0] = np.uint64(_mixed(key, seed, 1))
            left = _span(mu, keyed)
    return table


@compiled
def _has(table: Longs, key: int) -> bool:
    if len(table) == 0 or key < 0:
        return False
    where = key & (len(table) - 1)
    while table[where] >= 0:
        if table[where] == key:
            return True
        where = (where + 1) & (len(table) - 1)
    return False


@compiled
def _matching(text: TokenIds, start: int, end: int, token: int, state: State) -> int:
    """A random position of text[start:end] after `token`; any position if there is none."""
    size = end - start
    first = int(_uniform(state) * size)
    for i in range(size - 1):
        position = start + (first + i) % (size - 1)
        if text[position] == token:
            return position + 1
    return start + first


@compiled
def _edited(
    text: TokenIds,
    starts: Longs,
    source: int,
    rules: Longs,
    seed: int,
    mu: float,
    edit_tokens: float,
    state: State,
    out: TokenIds,
) -> int:
    """Fill `out` with an edited copy of the texts; returns the number of copied tokens."""
    keyed = np.empty(1, dtype=np.uint64)
    position, end = starts[source], starts[source + 1] - 1
    made, copied, left = 0, 0, _span(mu, state)
    moved = False
    while made < len(out):
        if position >= end:
            source = int(_uniform(state) * (len(starts) - 1))
            position, end = starts[source], starts[source + 1] - 1
            position = _matching(text, position, end, out[made - 1] if made else 0, state)
            continue
        key = _key(text, position)
        systematic = moved and _has(rules, key)
        if left > 0 and not systematic:
            out[made] = text[position]
            made, copied, position, left, moved = made + 1, copied + 1, position + 1, left - 1, True
            continue
        if systematic:
            keyed[0] = np.uint64(_mixed(key, seed, 0))
            draws = keyed
        else:
            left = _span(mu, state)
            draws = state
        moved = False
        kind = np.searchsorted(KIND_LIMITS, _uniform(draws), side="right")
        length = _geometric(edit_tokens, draws)
        if kind == JUMP:
            source = int(_uniform(draws) * (len(starts) - 1))
            end = starts[source + 1] - 1
            position = _matching(text, starts[source], end, out[made - 1] if made else 0, draws)
            continue
        if kind != DELETION:
            for _ in range(min(length, len(out) - made)):
                out[made] = _novel(out[made - 1] if made else 0, draws)
                made += 1
        if kind != INSERTION:
            position += length
    return copied
