"""Tokens per CPU second of real vLLM engines that decode the same recorded responses with different drafts.

`python -m benchmarks.rollout --json OUT [--quick] [--rounds 1] [--resume]`: one engine process per method, each with
one thread and a model of 184 M random weights that is forced to emit generated traces
(`benchmarks.rollout.forced_sampler`). So forwards are real, and all methods emit the same texts. In every round each
batch size gets new prompts with a history of one visit, five times. The methods alternate after some tokens, so a busy
machine slows all of them alike. Stock and the peers sample with vLLM's sampler, and in a second start of the engines
with the product's, too. Every start warms the engines up. Before the first round, settings of the peers are chosen on
other prompts (`benchmarks.rollout.settings`). A round takes about two and a half hours. OUT is written after every row,
and `--resume` continues it. `--methods stock ours` and `--histories` select what is measured of the missing rounds.
`--quick` uses a small model, short responses and one round of three methods. `--trained DIR`, with the work directory
of a quickstart, measures models that sample their own responses (`benchmarks.rollout.trained`).
"""

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path

import numpy as np
import psutil

from benchmarks.drafting.baselines import arctic
from benchmarks.drafting.traces import SIBLINGS, VOCABULARY, generate
from benchmarks.harness.record import Goal, Input, Row, arguments, rows_before, write
from benchmarks.harness.record_inputs import arctic_inputs, quickstart_inputs
from benchmarks.rollout.client import EngineProcess, Setup, engines
from benchmarks.rollout.server import METHODS
from benchmarks.rollout.settings import CALIBRATION, best_settings, is_calibration, rounds_of_settings, speculations
from benchmarks.rollout.traced_engine import write_model
from benchmarks.rollout.trained import checkpoints, trained_goals, trained_rows
from history.store.traces import write_traces

BATCHES = (1, 8, 32, 64)
REUSE = {"87 % reuse": 0.87, "random history": 0.0, CALIBRATION: 0.87}
MEASURED = tuple(name for name in REUSE if name != CALIBRATION)
SAMPLERS = ("vLLM", "product")
"""Who samples for stock and peers; for `ours` it is always the product."""
LOWEST_RATIO = 0.95
QUICK_METHODS = ("ngram",)
"""Peers of a quick run; starting an engine takes a large part of its minute."""
RESAMPLES = 2000
LEAST_TURNS = 5
"""Fewest turns for a goal; fewer have no interval."""
REPEATS = 5
"""Turns per round and batch size, each with other prompts."""
CALIBRATION_BATCHES, CALIBRATION_REPEATS = (8, 32), 2
FEW_ROWS = 8
"""Batch size up to which responses have their full length; those of larger batches have half of it, to save time."""
FIRST_SEED = 100
"""Seed of the first measured prompts; smaller seeds belong to the choice of settings."""
WARM_UP = 3
"""Factor by which responses of warm-up turns are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Model shape, response length and batch sizes."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    num_tokens: int
    """Mean length of a measured response."""
    batches: Sequence[int] = BATCHES

    @property
    def max_model_len(self) -> int:
        """Room for a prompt of 64 tokens and the longest response (sigma 0.25 over prompts, 0.1 in a group)."""
        return 64 + 3 * self.num_tokens


FULL = Size(hidden=1024, layers=12, heads=16, intermediate=3072, num_tokens=384)
QUICK = Size(hidden=128, layers=2, heads=4, intermediate=256, num_tokens=48, batches=(1, 8))


def write_cell(work: Path, *, reuse: float, batch: int, num_tokens: int, seed: int) -> tuple[Path, Path]:
    """Generate new prompts; returns the files of their earlier visit and of the `batch` responses to decode."""
    prompts = -(-batch // SIBLINGS)
    generated = generate(reuse=reuse, num_tokens=num_tokens, num_prompts=prompts, seed=seed)
    history, traces = work / f"{seed}-before.jsonl", work / f"{seed}.jsonl"
    write_traces(history, [trace for trace in generated.traces if trace.step == 0])
    write_traces(traces, [trace for trace in generated.traces if trace.step == 1][:batch])
    return history, traces


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


def measure(running: Mapping[str, EngineProcess], work: Path, turn: Turn, num_tokens: int) -> Iterator[Row]:
    """Rows of a turn; the methods alternate after each slice."""
    shorter = num_tokens if turn.batch <= FEW_ROWS else num_tokens // 2
    history, traces = write_cell(work, reuse=REUSE[turn.history], batch=turn.batch, num_tokens=shorter, seed=turn.seed)
    methods = turn.methods(list(running))
    for method in methods:
        running[method].begin(history, traces)
    finished: dict[str, dict[str, float]] = {}
    while len(finished) < len(methods):
        for method in [method for method in methods if method not in finished]:
            if (figures := running[method].decode_slice()) is not None:
                finished[method] = figures
    for method in methods:
        yield {
            "round": turn.round,
            "repeat": turn.repeat,
            "history": turn.history,
            "batch": turn.batch,
            "sampler": turn.sampler,
            "method": method,
            **finished[method],
        }


def ratios(
    rows: Sequence[Row], kind: str, batch: int, method: str, other: str, sampler: str = SAMPLERS[0]
) -> list[float]:
    """Tokens per CPU second of `method` over those of `other`, for each turn with this sampler."""
    cell = {
        (row["round"], row.get("repeat", 0), row["method"]): float(row["tokens_per_cpu_s"])
        for row in rows
        if (row["history"], row["batch"], row.get("sampler", SAMPLERS[0])) == (kind, batch, sampler)
    }
    decoded = sorted({key[:2] for key in cell})
    return [
        cell[*turn, method] / cell[*turn, other] for turn in decoded if {(*turn, method), (*turn, other)} <= cell.keys()
    ]


def lower_bound(values: Sequence[float]) -> float:
    """Lower 95 % bootstrap bound of the median."""
    draws = np.random.default_rng(0).choice(np.array(values), size=(RESAMPLES, len(values)))
    return float(np.quantile(np.median(draws, axis=1), 0.05))


def goals(rows: Sequence[Row], methods: Sequence[str], batches: Sequence[int]) -> list[Goal]:
    """Goals for the product over each method: lower 95 % bounds of the median ratio over the turns."""
    kind = MEASURED[0]
    found = []
    for sampler in SAMPLERS:
        remark = "" if sampler == SAMPLERS[0] else f", {sampler}'s sampler for both"
        for history, batch, other in product(MEASURED, batches, methods):
            turns = ratios(rows, history, batch, "ours", other, sampler) if other != "ours" else []
            if len(turns) < LEAST_TURNS:
                continue
            bound = {("stock", 1): 2.5, ("stock", 8): 1.5}.get((other, batch), 1.0) if history == kind else LOWEST_RATIO
            name = f"ours over {other}, batch {batch}, {history}{remark}"
            found.append(Goal(name=name, value=lower_bound(turns), bound=bound, direction="at least", unit="x"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The record of a command while it grows, and the setting in which its rows are measured."""

    path: Path
    size: Size
    methods: Sequence[str]
    work: Path
    inputs: Sequence[Input]
    not_measured: Sequence[str]
    rows: list[Row]

    def add(self, row: Row) -> None:
        """Append a row, print it and write the record."""
        self.rows.append({**row, "load_average": psutil.getloadavg()[0]})
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), flush=True)
        self.write()

    def write(self, goals: Sequence[Goal] = ()) -> None:
        """Write the record as it is now."""
        write(self.path, rows=self.rows, goals=goals, not_measured=self.not_measured, inputs=self.inputs)

    def write_model(self) -> None:
        """Write the model with random weights that all engines load."""
        write_model(
            self.work / "model",
            vocabulary=VOCABULARY,
            hidden=self.size.hidden,
            layers=self.size.layers,
            intermediate=self.size.intermediate,
            heads=self.size.heads,
        )

    def setup(self, *, sampler: str, settings: Mapping[str, str]) -> Setup:
        """How the engines of a start run."""
        return Setup(
            model=self.work / "model",
            max_model_len=self.size.max_model_len,
            max_num_seqs=max(self.size.batches),
            own_sampler=sampler != SAMPLERS[0],
            settings=speculations(settings),
        )

    def decode(self, missing: Round) -> None:
        """Start an engine for each method, warm the engines up and decode the turns of a round."""
        settings = best_settings(self.rows)
        with engines(self.methods, self.work, self.setup(sampler=missing.sampler, settings=settings)) as running:
            for turn in missing.warm_ups:
                for _ in measure(running, self.work, turn, self.size.num_tokens // WARM_UP):
                    pass
            for turn in missing.turns:
                for row in measure(running, self.work, turn, self.size.num_tokens):
                    self.add({**row, **_named(settings, str(row["method"]))})

    def calibrate(self) -> None:
        """Decode the calibration turns with every setting of the peers, unless the record has their rows."""
        if any(is_calibration(row) for row in self.rows):
            return
        for settings in rounds_of_settings(self.methods):
            with engines(list(settings), self.work, self.setup(sampler=SAMPLERS[0], settings=settings)) as running:
                turns = calibration_turns(self.size.batches)
                for _ in measure(running, self.work, turns[0], self.size.num_tokens // WARM_UP):
                    pass
                for turn in turns:
                    for row in measure(running, self.work, turn, self.size.num_tokens):
                        self.add({**row, **_named(settings, str(row["method"]))})

    def round_goals(self) -> list[Goal]:
        """Goals of the decoded rounds, for the methods that the rows name."""
        decoded = {row["method"] for row in self.rows if not is_sampled(row) and not is_calibration(row)}
        return goals(self.rows, [name for name in METHODS if name in decoded], self.size.batches)


def _named(settings: Mapping[str, str], method: str) -> dict[str, str]:
    """The field of a row that names the method's setting, if it has one."""
    return {"setting": settings[method]} if method in settings else {}


def is_sampled(row: Row) -> bool:
    """Whether a row is one of `--trained`, in which the model samples its own responses."""
    return "temperature" in row


def _parser() -> argparse.ArgumentParser:
    parser = arguments("Decoding speed of real engines with drafts of several methods.")
    parser.add_argument("--rounds", type=int, default=1, help="0: only the rows of --trained")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="stock and ours always run")
    parser.add_argument(
        "--histories", nargs="+", choices=MEASURED, default=MEASURED, help="histories whose turns are decoded"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/bench/rollout"))
    parser.add_argument("--resume", action="store_true", help="keep the complete turns of OUT")
    parser.add_argument("--trained", type=Path, help="work directory of a quickstart, whose models sample themselves")
    return parser


def chosen_methods(named: Sequence[str] | None, *, quick: bool) -> list[str]:
    """Methods to run, in the order of METHODS; stock and ours always run."""
    chosen = {"stock", "ours", *(named or (QUICK_METHODS if quick else METHODS))}
    return [name for name in METHODS if name in chosen]


def missing_rounds(options: argparse.Namespace, before: Sequence[Row], measurement: Measurement) -> list[Round]:
    """Rounds with the turns that have to be decoded; rows of complete turns are added to the measurement."""
    num_rounds = 1 if options.quick else options.rounds
    # a record with more rounds than the command names keeps the rows of all its rounds
    all_rounds = rounds(measurement.size.batches, max([num_rounds, *(int(row.get("round", 0)) for row in before)]))
    complete, incomplete = split(all_rounds, before, measurement.methods)
    measurement.rows.extend(complete)
    missing = [
        replace(part, turns=[turn for turn in part.turns if turn.history in options.histories])
        for part in incomplete
        if part.number <= num_rounds
    ]
    return [part for part in missing if part.turns]


def main(argv: Sequence[str] | None = None) -> int:
    """Decode the missing turns, sample from trained models if asked to, and write the goals."""
    options = _parser().parse_args(argv)
    if options.trained is not None:
        checkpoints(options.trained)
    before = rows_before(options.json, resume=options.resume)
    sampled = [row for row in before if is_sampled(row) and options.trained is None]
    calibration = [row for row in before if is_calibration(row)]
    methods, not_measured = chosen_methods(options.methods, quick=options.quick), ["any GPU"]
    if options.trained is None and not sampled:
        not_measured.append("acceptance and losslessness on a trained model: none was given with --trained")
    if "suffix" in methods and arctic.load(arctic.DIRECTORY) is None:
        methods.remove("suffix")
        build = "python -m benchmarks.drafting.baselines.arctic"
        not_measured.append(f"suffix: {arctic.DIRECTORY} is not built; run `{build}`")
    inputs = [*quickstart_inputs(options.trained), *(arctic_inputs(arctic.DIRECTORY) if "suffix" in methods else ())]
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    measurement = Measurement(
        path=options.json,
        size=QUICK if options.quick else FULL,
        methods=methods,
        work=options.work,
        inputs=inputs,
        not_measured=not_measured,
        rows=[],
    )
    measurement.write_model()
    missing = missing_rounds(options, before, measurement)
    measurement.rows.extend([*calibration, *sampled])
    if missing and not options.quick:
        measurement.calibrate()
    for part in missing:
        measurement.decode(part)
    if options.trained is not None:
        settings = speculations(best_settings(measurement.rows))
        for row in trained_rows(options.trained, methods, options.work, settings, quick=options.quick):
            measurement.add(row)
            sampled.append(row)
    has_goals = bool(options.rounds) and not options.quick
    measurement.write([*(measurement.round_goals() if has_goals else ()), *trained_goals(sampled)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
