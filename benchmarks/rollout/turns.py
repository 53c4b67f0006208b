"""The turns of `benchmarks.rollout`: which batches of responses are decoded, in which order, and which are missing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from benchmarks.drafting.traces import SIBLINGS, generate
from benchmarks.harness.record import Row
from benchmarks.rollout.settings import CALIBRATION
from history.store.traces import write_traces

BATCHES = (1, 8, 32, 64)
REUSE = {"87 % reuse": 0.87, "random history": 0.0, CALIBRATION: 0.87}
MEASURED = tuple(name for name in REUSE if name != CALIBRATION)
SAMPLERS = ("vLLM", "product")
"""Who samples for stock and peers; for `ours` it is always the product."""
REPEATS = 5
"""Turns per round and batch size, each with other prompts."""
CALIBRATION_BATCHES, CALIBRATION_REPEATS = (8, 32), 2
FIRST_SEED = 100
"""Seed of the first measured prompts; smaller seeds belong to the choice of settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A batch of responses that all methods decode."""

    round: int
    repeat: int
    history: str
    batch: int
    seed: int
    """Seed of the prompts; different for every turn."""
    sampler: str = SAMPLERS[0]

    def methods(self, methods: Sequence[str]) -> list[str]:
        """Methods in the order of this turn; peers are left out where the history is useless."""
        some = [name for name in methods if REUSE[self.history] or name in ("stock", "ours")]
        first = (self.round + self.repeat) % len(some)
        return some[first:] + some[:first]

    def has(self, row: Row) -> bool:
        """Whether a row belongs to this turn."""
        key = {"round": self.round, "repeat": self.repeat, "history": self.history, "batch": self.batch}
        return key.items() <= row.items() and row.get("sampler", SAMPLERS[0]) == self.sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The turns that one set of engines decodes."""

    number: int
    warm_ups: Sequence[Turn]
    """Turns that are not measured; the useful history comes last, so the measured turns start after it."""
    turns: Sequence[Turn]
    sampler: str = SAMPLERS[0]


def rounds(batches: Sequence[int], num_rounds: int) -> Iterator[Round]:
    """All rounds, each with one sampler after the other."""
    seeds = count(FIRST_SEED)
    for number in range(1, num_rounds + 1):
        for sampler in SAMPLERS:

            def turn(history: str, batch: int, repeat: int = 0, number: int = number, sampler: str = sampler) -> Turn:
                return Turn(
                    round=number, repeat=repeat, history=history, batch=batch, seed=next(seeds), sampler=sampler
                )

            yield Round(
                number=number,
                sampler=sampler,
                warm_ups=[turn(history, batch) for history in reversed(MEASURED) for batch in batches],
                turns=[
                    turn(history, batch, repeat)
                    for history in MEASURED
                    for batch in batches
                    for repeat in range(REPEATS)
                ],
            )


def calibration_turns(batches: Sequence[int]) -> list[Turn]:
    """The turns that every setting of a peer decodes; their seeds are below those of all rounds."""
    seeds = count(1)
    return [
        Turn(round=0, repeat=repeat, history=CALIBRATION, batch=batch, seed=next(seeds))
        for batch in batches
        if batch in CALIBRATION_BATCHES
        for repeat in range(CALIBRATION_REPEATS)
    ]


def whole_turn(turn: Turn, rows: Sequence[Row], methods: Sequence[str]) -> list[Row]:
    """The turn's rows if every method has decoded it; else none, and all methods decode it again."""
    of_turn = [row for row in rows if turn.has(row)]
    return of_turn if {row["method"] for row in of_turn} >= set(turn.methods(methods)) else []


def split(all_rounds: Iterable[Round], before: Sequence[Row], methods: Sequence[str]) -> tuple[list[Row], list[Round]]:
    """Rows of the complete turns, and the rounds with their missing turns."""
    complete: list[Row] = []
    incomplete = []
    for part in all_rounds:
        missing = []
        for turn in part.turns:
            rows = whole_turn(turn, before, methods)
            complete += rows
            missing += [turn] if not rows else []
        incomplete.append(replace(part, turns=missing))
    return complete, incomplete


def write_cell(work: Path, *, reuse: float, batch: int, num_tokens: int, seed: int) -> tuple[Path, Path]:
    """Generate new prompts; returns the files of their earlier visit and of the `batch` responses to decode."""
    prompts = -(-batch // SIBLINGS)
    generated = generate(reuse=reuse, num_tokens=num_tokens, num_prompts=prompts, seed=seed)
    history, traces = work / f"{seed}-before.jsonl", work / f"{seed}.jsonl"
    write_traces(history, [trace for trace in generated.traces if trace.step == 0])
    write_traces(traces, [trace for trace in generated.traces if trace.step == 1][:batch])
    return history, traces
