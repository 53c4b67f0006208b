"""A long run of small steps, in which memory, file descriptors and shared memory must not grow.

`python -m benchmarks.learning.soak --json OUT [--steps 200]` makes the example's data and untrained model and runs RL
with small steps. The goals compare the last quarter of the run with its second quarter.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.process_tree import Usage, growth, watch
from benchmarks.harness.record import Goal, Row, arguments, write

SMALL = (
    *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "algorithm.filter=none"),
    *("sampling.max_response_tokens=32", "engine.max_num_seqs=16", "engine.kv_cache_bytes=67108864"),
    *("evaluation.sets={}", "evaluation.bf16_before_after=false", "checkpoint.every=20"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps and write the record. SystemExit if the run fails."""
    parser = arguments("Memory, descriptors and shared memory over many steps.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--work", type=Path, default=Path("runs/bench/soak"))
    options = parser.parse_args(argv)
    steps = 5 if options.quick else options.steps
    work = options.work
    shutil.rmtree(work, ignore_errors=True)
    for module, folder in (("make_data", "data"), ("make_model", "model")):
        command = [sys.executable, "-m", f"examples.arithmetic.{module}", "--out", str(work / folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    command = [
        *(sys.executable, "-m", "launcher", "run", "examples/arithmetic/rl.yaml", f"num_steps={steps}"),
        *(f"model={work / 'model'}", f"run_dir={work / 'run'}"),
        *(f"data.train.0.path={work / 'data' / 'train.jsonl'}", *SMALL),
    ]
    code, seconds, samples = watch(command, log=work / "run.log", every_s=2.0)
    if code:
        raise SystemExit((work / "run.log").read_text(encoding="utf-8")[-3000:])
    stepping = _while_stepping(samples, work / "run")
    rows: list[Row] = [
        {
            "second": round(sample.seconds, 1),
            "memory_bytes": sample.memory_bytes,
            "shm_bytes": sample.shm_bytes,
            "num_fds": sample.num_fds,
            "num_processes": sample.num_processes,
        }
        for sample in stepping
    ]
    goals = [] if options.quick else _goals(stepping, seconds, steps)
    write(options.json, rows=rows, goals=goals, not_measured=["any GPU", "more than one node"])
    return 0


def _while_stepping(samples: Sequence[Usage], run_dir: Path) -> list[Usage]:
    """Samples between the end of the first step and the end of the last."""
    spans = [json.loads(line) for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [span for span in spans if span["activity"] == "train"]
    length = trained[-1]["end_s"] - trained[0]["end_s"]
    full = max(sample.num_processes for sample in samples)
    busy = [sample for sample in samples if sample.num_processes >= full - 2]
    return [sample for sample in busy if busy[-1].seconds - sample.seconds <= length]


def _goals(samples: Sequence[Usage], seconds: float, steps: int) -> list[Goal]:
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[3 * quarter :]
    share = "of itself"
    grown = growth(early, late)
    return [
        Goal(name="memory, growth", value=grown["memory_bytes"], bound=0.03, direction="at most", unit=share),
        Goal(name="descriptors, growth", value=grown["num_fds"], bound=0.01, direction="at most", unit=share),
        Goal(name="shared memory, growth", value=grown["shm_bytes"], bound=0.05, direction="at most", unit="of itself"),
        Goal(name="steps", value=steps, bound=200, direction="at least", unit="steps"),
        Goal(name="seconds", value=seconds, bound=3600, direction="at most", unit="s"),
    ]


if __name__ == "__main__":
    sys.exit(main())
