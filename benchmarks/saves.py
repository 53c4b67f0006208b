"""How long a checkpoint in the background keeps the run waiting, as a share of the save.

`python -m benchmarks.saves --json OUT [--saves 6] [--quick]`: a trainer of two data-parallel ranks with the distributed
optimizer holds a model of a quarter of a billion random weights, hidden 2048. It saves in the background and in the
foreground in turn, each `--saves` times; the first of each plans, and does not count.

Rows: one per save. `begin_s` is the wait until the trainer may go on, `finish_s` that at the end of a later step, after
all files are written; `blocked_s` is their sum. `save_s` is the time from the begin to the last file on disk.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.publish.parts import write_model
from launcher.cluster.processes import processes
from launcher.config.schema import ClusterConfig
from megatron_rl.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, PublishConfig, TrainerConfig
from megatron_rl.ranks import trainer_ranks
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import TrainerSpec
from rollout.weights.format import WeightFormat

PARALLEL = ParallelConfig(data=2)
NUM_LAYERS, HIDDEN = 2, 2048
"""Few large matrices, as the ranks of large models have: plans take their time by tensor, copies and files by byte."""
LIMIT_S = 300.0
MOST_SHARE = 0.1
"""Of a save in the background, that the run may wait."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the saves and write the record. TimeoutError if a save is not written in time."""
    parser = arguments("Waits for checkpoints in the background and in the foreground.")
    parser.add_argument("--saves", type=int, default=6, help="of each kind, the first of which does not count")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/saves"))
    options = parser.parse_args(argv)
    work: Path = options.work
    shutil.rmtree(work, ignore_errors=True)
    model = write_model(
        work / "model", quick=options.quick, num_layers=NUM_LAYERS, hidden=512 if options.quick else HIDDEN
    )
    rows: list[Row] = []
    with processes(ClusterConfig(), num_actors=2, log_dir=None) as running:
        trainer = running.start_trainer(_spec(model), trainer_ranks(PARALLEL, cpu_threads=1))
        for number in range(2 if options.quick else options.saves):
            for background in (True, False) if number % 2 else (False, True):
                row = _save(trainer, work / "checkpoint", background=background)
                rows += [{"save": number, **row}] if number else []
    reached = [] if options.quick else goals(rows)
    write(options.json, rows=rows, goals=reached, not_measured=["any GPU: pinned copies", "shared file systems"])
    return 0


def _spec(model: Path) -> TrainerSpec:
    return TrainerSpec(
        model=str(model),
        run_id="benchmark",
        config=TrainerConfig(dtype="bf16", parallel=PARALLEL, optimizer=OptimizerConfig(distributed=True)),
        algorithm=AlgorithmConfig(),
        publish=PublishConfig(),
        format=WeightFormat(name="bf16"),
        temperature=1.0,
        max_response_tokens=128,
        total_updates=1,
        seed=0,
    )


def _save(trainer: TrainerGroup, folder: Path, *, background: bool) -> Row:
    """The row of one save; the ranks are idle while their threads write."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    started = time.perf_counter()
    trainer.begin_save(str(folder), background=background)
    begin_s = time.perf_counter() - started
    while background and not trainer.save_is_written(wait_s=1.0):
        if time.perf_counter() - started > LIMIT_S:
            raise TimeoutError(f"a save is not written after {LIMIT_S:.0f} s")
        time.sleep(0.05)
    finishing = time.perf_counter()
    save_s = trainer.finish_save()
    finish_s = time.perf_counter() - finishing
    return {
        "kind": "background" if background else "foreground",
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "begin_s": begin_s,
        "finish_s": finish_s,
        "blocked_s": begin_s + finish_s,
        "save_s": save_s,
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The share of a save in the background for which the run waits, as the median."""
    shares = [float(row["blocked_s"]) / float(row["save_s"]) for row in rows if row["kind"] == "background"]
    name = "wait for a save in the background, as a share of the save"
    return [Goal(name=name, value=statistics.median(shares), bound=MOST_SHARE, direction="at most", unit="")]


if __name__ == "__main__":
    sys.exit(main())
