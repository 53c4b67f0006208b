"""Share of the codes that a small optimizer step changes, and the bytes that a delta then sends.

`python -m benchmarks.publish.delta --json OUT [--warm DIR] [--quick]`: 25 steps of the example's RL (Adam, 8 prompts)
from a warm start at constant learning rates of 1e-6, 1e-5 and 1e-4, with `publish.delta` over sockets. DIR is a
quickstart's work directory; without it a warm start is made first.

Rows: one per format and learning rate, medians over the steps from the 21st on: the share of codes that changed, and
the bytes sent over those of a full publish. A run takes about two minutes.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.example_run import run_example
from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.harness.record_inputs import quickstart_inputs
from benchmarks.learning.example_epochs import warm_start
from megatron_rl.memory import weight_bytes
from megatron_rl.model.spec import read_model_spec
from rollout.config import Format
from rollout.weights.format import WeightFormat

FORMATS: tuple[Format, ...] = ("int8", "fp8_block")
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
NUM_STEPS, QUICK_STEPS = 25, 3
SETTLED = 20
"""Steps until Adam's moments have settled."""
NOT_MEASURED = ("any GPU", "a model of billions of parameters")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and write the record. SystemExit if a command fails."""
    parser = arguments("Share of codes that change from step to step, and bytes sent.")
    parser.add_argument("--warm", type=Path, help="work directory of a quickstart to take data and warm start from")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/publish_delta"))
    options = parser.parse_args(argv)
    warm = options.warm or warm_start(options.work / "warm", quick=options.quick)
    inputs = quickstart_inputs(options.warm)
    rows: list[Row] = []
    for format in FORMATS[:1] if options.quick else FORMATS:
        for learning_rate in LEARNING_RATES[:1] if options.quick else LEARNING_RATES:
            rows.append(run(warm, options.work, format, learning_rate, quick=options.quick))
            write(options.json, rows=rows, not_measured=NOT_MEASURED, inputs=inputs)
    reached = [] if options.quick else goals(rows)
    write(options.json, rows=rows, goals=reached, not_measured=NOT_MEASURED, inputs=inputs)
    return 0


def run(warm: Path, work: Path, format: Format, learning_rate: float, *, quick: bool = False) -> Row:
    """The row of one run."""
    run_dir = work / f"{format}-{learning_rate:g}"
    keys = [
        "wandb.mode=disabled",
        "evaluation.sets={}",
        "algorithm.prompts_per_step=8",
        f"num_steps={QUICK_STEPS if quick else NUM_STEPS}",
        f"engine.format={format}",
        "publish.delta=true",
        "publish.transport=gloo",
        "publish.delta_full_every=0",
        f"trainer.optimizer.learning_rate={learning_rate}",
        "trainer.optimizer.warmup_steps=0",
    ]
    metrics, seconds = run_example(warm, run_dir, keys)
    last = metrics[0 if quick else SETTLED :]
    whole = weight_bytes(read_model_spec(warm / "warm"), WeightFormat(name=format))
    return {
        "format": format,
        "learning_rate": learning_rate,
        "changed_share": statistics.median(row["publish/changed_share"] for row in last),
        "bytes_share": statistics.median(row["publish/wire_bytes"] / whole for row in last),
        "whole_bytes": whole,
        "seconds": round(seconds, 1),
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goal: at most a quarter of the bytes at the learning rate of large models."""
    return [
        Goal(
            name=f"{row['format']}, bytes of a delta at learning rate 1e-6",
            value=float(row["bytes_share"]),
            bound=0.25,
            direction="at most",
            unit="of all",
        )
        for row in rows
        if row["learning_rate"] == LEARNING_RATES[0]
    ]


if __name__ == "__main__":
    sys.exit(main())
