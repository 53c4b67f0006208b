"""A second model of generated responses: phrases of an outline, instead of edited copies of one old response.

The answers to a prompt follow an outline. At each of its places, a response says one of the phrases known there, or
(with one minus the reuse) a new phrase. Some places are skipped, and at some the response says an earlier phrase again.
Known are, in epoch 0, a few hidden phrases of unequal chance; later, what the siblings of the epoch before said at this
place. So one old response is followed for one phrase only, then several continuations compete.

The model shares no edits, jumps or span lengths with `benchmarks.drafting.traces`. Its constants were written down once
and nothing was chosen by the drafters' results.
"""

import numpy as np

from benchmarks.drafting.traces import (
    END_OF_SEQUENCE,
    EPOCH_LENGTH_SIGMA,
    FIRST_REUSE,
    PROMPT_LENGTH_SIGMA,
    PROMPT_TOKENS,
    SIBLINGS,
    Generated,
    State,
    fresh,
)
from history.store.traces import Trace
from history.types import TokenIds

PHRASE_TOKENS, PHRASE_SIGMA = 20.0, 0.6
"""Mean tokens of a phrase, and spread of their logarithm."""
HIDDEN_PHRASES = 4
"""Phrases known at each place in epoch 0; the n-th has a chance in proportion to 1 / n."""
SKIPPED, REPEATED = 0.1, 0.05
"""Shares of the places that a response skips, and at which it first says an earlier phrase again."""

Phrases = list[TokenIds]


def generate(
    *, reuse: float, num_tokens: int, num_prompts: int, num_epochs: int = 2, num_siblings: int = SIBLINGS, seed: int = 0
) -> Generated:
    """Responses of about `num_tokens` tokens; from epoch 1 on, a share `reuse` of the phrases is known."""
    if not 0.0 <= reuse <= 1.0:
        raise ValueError(f"reuse {reuse}: must lie between 0 and 1")
    traces: list[Trace] = []
    copied, total = 0, 0
    for prompt in range(num_prompts):
        draws = np.random.default_rng((seed, prompt, 1))
        state: State = draws.integers(1 << 63, size=1, dtype=np.uint64)
        prompt_ids = fresh(PROMPT_TOKENS, state)
        mean = num_tokens * draws.lognormal(-(PROMPT_LENGTH_SIGMA**2) / 2, PROMPT_LENGTH_SIGMA)
        num_places = max(int(mean / PHRASE_TOKENS / (1 - SKIPPED + REPEATED)), 2)
        known = [[_phrase(draws, state) for _ in range(HIDDEN_PHRASES)] for _ in range(num_places)]
        chances = 1.0 / np.arange(1, HIDDEN_PHRASES + 1)
        for epoch in range(num_epochs):
            said: list[Phrases] = [[] for _ in known]
            for sample in range(num_siblings):
                response, num_copied = _response(
                    known, said, chances if epoch == 0 else None, reuse if epoch else FIRST_REUSE, draws, state
                )
                traces.append(
                    Trace(
                        step=epoch,
                        prompt_id=f"phrases-{seed}-{prompt}",
                        sample=sample,
                        prompt_ids=prompt_ids,
                        response_ids=response,
                        reward=float(draws.integers(2)),
                    )
                )
                if epoch:
                    copied, total = copied + num_copied, total + len(response)
            known = [phrases or before for phrases, before in zip(said, known, strict=True)]
    return Generated(traces=sorted(traces, key=lambda trace: trace.step), reuse=copied / max(total, 1))


def _response(
    known: list[Phrases],
    said: list[Phrases],
    chances: np.ndarray[tuple[int], np.dtype[np.float64]] | None,
    reuse: float,
    draws: np.random.Generator,
    state: State,
) -> tuple[TokenIds, int]:
    """One response and its number of copied tokens; appends its phrases to `said`, by place."""
    parts: Phrases = []
    copied = 0
    length = draws.lognormal(0.0, EPOCH_LENGTH_SIGMA)
    for place in range(max(int(len(known) * min(length, 1.0)), 1)):
        if draws.random() < SKIPPED:
            continue
        if parts and draws.random() < REPEATED:
            parts.append(parts[int(draws.integers(len(parts)))])
            copied += len(parts[-1])
        if draws.random() < reuse:
            weights = np.ones(len(known[place])) if chances is None else chances
            parts.append(known[place][int(draws.choice(len(weights), p=weights / weights.sum()))])
            copied += len(parts[-1])
        else:
            parts.append(_phrase(draws, state))
        said[place].append(parts[-1])
    response = np.concatenate([*parts, np.array([END_OF_SEQUENCE], dtype=np.int32)])
    return response.astype(np.int32), copied


def _phrase(draws: np.random.Generator, state: State) -> TokenIds:
    mu = np.log(PHRASE_TOKENS) - PHRASE_SIGMA**2 / 2
    return fresh(max(int(draws.lognormal(mu, PHRASE_SIGMA) + 0.5), 1), state)
