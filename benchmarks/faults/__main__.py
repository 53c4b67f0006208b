"""Kills and freezes processes of small runs, and records whether each run ended as if nothing had happened.

`python -m benchmarks.faults --json OUT [--only PATTERN] [--seed N] [--resume]` disturbs a run for each cell of the
table (`benchmarks.faults.cells`), about a minute each. `--only` chooses cells by a regular expression. A run whose exit
code asks for it is started again, as SLURM would do. The exit code is 1 if a row of the record is not as promised.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.cells import Cell, RunKind, cells
from benchmarks.faults.example import make_example, write_config
from benchmarks.faults.inject import run_disturbed
from benchmarks.faults.outcome import outcome
from benchmarks.harness.record import Goal, Row, arguments, rows_before, write

QUICK = ("exact: kill trainer rank in train",)


def main(argv: Sequence[str] | None = None) -> int:
    """Disturb a run for each chosen cell and write the record."""
    parser = arguments("Deaths and freezes of every kind of process in every phase.")
    parser.add_argument("--only", default="", help="cells whose name this regular expression finds")
    parser.add_argument("--seed", type=int, default=0, help="of the moment within a phase")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the record, if there is one")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/faults"))
    options = parser.parse_args(argv)
    if not any(re.search(options.only, cell.name) for cell in cells()):
        parser.error(f"--only {options.only!r} finds no cell")
    rows = rows_before(options.json, resume=options.resume)
    known = {row["cell"] for row in rows}
    chosen = [cell for cell in cells() if re.search(options.only, cell.name) and cell.name not in known]
    if options.quick:
        chosen = [cell for cell in chosen if cell.name in QUICK]
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    make_example(options.work)
    for kind in dict.fromkeys(cell.run for cell in chosen):
        _undisturbed(options.work, kind)
    for number, cell in enumerate(chosen):
        row = _disturbed(options.work, cell, seed=options.seed + number)
        rows.append(row)
        print(f"{cell.name}: {'as promised' if row['as_promised'] else 'NOT as promised'}  {row}", flush=True)
        _write(options.json, rows)
    return 0 if all(row["as_promised"] for row in rows) else 1


def _undisturbed(work: Path, kind: RunKind) -> None:
    """A run to which nothing happens."""
    ended = run_disturbed(write_config(work, kind), work / kind, None, seed=0)
    if ended.codes != (0,):
        raise SystemExit((work / f"{kind}.log").read_text(encoding="utf-8")[-3000:])


def _disturbed(work: Path, cell: Cell, *, seed: int) -> Row:
    run_dir = work / cell.name.replace(": ", "-").replace(" ", "-")
    config = write_config(work, cell.run, scores_slowly=cell.moment.scores)
    ended = run_disturbed(config, run_dir, cell, seed=seed)
    row = outcome(cell, run_dir, work / cell.run, ended)
    if row["as_promised"]:
        shutil.rmtree(run_dir)
    return row


def _write(path: Path, rows: Sequence[Row]) -> None:
    goals = [
        Goal(
            name="runs that ended as promised",
            value=sum(bool(row["as_promised"]) for row in rows) / len(rows),
            bound=1.0,
            direction="at least",
            unit="share of the cells",
        )
    ]
    missing = len(cells()) - len(rows)
    not_measured = ["any GPU", "nodes (`make faults`)", *([f"{missing} of {len(cells())} cells"] if missing else [])]
    write(path, rows=rows, goals=goals, not_measured=not_measured)


if __name__ == "__main__":
    sys.exit(main())
