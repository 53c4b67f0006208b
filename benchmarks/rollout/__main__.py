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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.drafting.baselines import arctic
from benchmarks.drafting.traces import VOCABULARY
from benchmarks.harness.record import Goal, Input, Row, arguments, rows_before, write
from benchmarks.harness.record_inputs import arctic_inputs, quickstart_inputs
from benchmarks.rollout.client import EngineProcess, Setup, engines
from benchmarks.rollout.goals import goals
from benchmarks.rollout.server import METHODS
from benchmarks.rollout.settings import best_settings, is_calibration, rounds_of_settings, speculations
from benchmarks.rollout.traced_engine import write_model
from benchmarks.rollout.trained import checkpoints, trained_goals, trained_rows
from benchmarks.rollout.turns import (
    BATCHES,
    MEASURED,
    REUSE,
    SAMPLERS,
    Round,
    Turn,
    calibration_turns,
    rounds,
    split,
    write_cell,
)

QUICK_METHODS = ("ngram",)
"""Peers of a quick run; starting an engine takes a large part of its minute."""
FEW_ROWS = 8
"""Batch size up to which responses have their full length; those of larger batches have half of it, to save time."""
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
