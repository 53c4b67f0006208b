"""Trains the arithmetic example for hours while random processes of the run are killed and frozen.

`python -m benchmarks.faults.soak --json OUT [--minutes 120] [--calm-steps 60] [--seed N]` makes the example's data and
warm start, trains undisturbed for some steps, and trains anew for two hours. Meanwhile a process of a random kind is
killed or frozen every 20 to 90 seconds. A run that ends with an exit code that asks for it is started again, as SLURM
would do. The goals compare rewards of the same steps of both runs, and resources of the last quarter of the time with
those of the second quarter. Nothing else may run on the machine: files in shared memory are counted.
"""

import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.cells import ROLES, SIGNALS, Fault
from benchmarks.faults.inject import AGAIN, targets
from benchmarks.faults.outcome import left_behind
from benchmarks.harness.example_run import read_metrics, run_example
from benchmarks.harness.process_tree import Usage, growth, usage
from benchmarks.harness.record import Goal, Row, arguments, write
from examples.arithmetic.quickstart import commands
from launcher.endings.kinds import Ending
from launcher.run_dir.status import read_now
from launcher.run_dir.stop_request import write_request

PAUSE_S = (20.0, 90.0)
"""Shortest and longest time between two faults."""
SAMPLE_S = 10.0
HANG_S = 900.0
COMPARED = 20
"""Last steps that both runs have, whose rewards are compared."""
KEYS = (
    *("algorithm.prompts_per_step=16", "evaluation.sets={}", "evaluation.bf16_before_after=false"),
    *("checkpoint.every=2", "engine.max_restarts=100000", "trainer.max_restarts=100000", "reward.max_restarts=100000"),
    *("engine.progress_timeout_s=30", "engine.update_timeout_s=60", "engine.start_timeout_s=150"),
    *("trainer.progress_timeout_s=60", "trainer.timeout_s=300", "publish.timeout_s=60", "reward.timeout_s=10"),
    "wandb.mode=disabled",
)
NEVER = 1_000_000
"""Steps of the disturbed run, which is stopped before."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice and write the record. SystemExit if a run fails."""
    parser = arguments("Random deaths and freezes over hours of training.")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--calm-steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of kinds of processes, faults and pauses")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/fault_soak"))
    options = parser.parse_args(argv)
    minutes, calm_steps = (2.0, 3) if options.quick else (options.minutes, options.calm_steps)
    work: Path = options.work
    shutil.rmtree(work, ignore_errors=True)
    phases = commands(work, 0, [], warm_steps=40 if options.quick else 0)
    for phase in ("data", "model", "warm start"):
        subprocess.run([sys.executable, *phases[phase]], check=True, stdout=subprocess.DEVNULL)
    calm, _ = run_example(work, work / "calm", [*KEYS, f"num_steps={calm_steps}"])
    storm = Storm(work=work, generator=random.Random(options.seed), ends_s=time.monotonic() + 60 * minutes)
    storm.run()
    stormy = read_metrics(work / "stormy")
    write(
        options.json,
        rows=storm.rows(stormy),
        goals=[] if options.quick else goals(calm, stormy, storm.samples, minutes=minutes, num_hung=storm.num_hung),
        not_measured=["any GPU", "nodes (`make faults`)", "a frozen controller, which nothing watches"],
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A fault that happened."""

    second: float
    time_s: float
    """Wall clock."""
    role: str
    fault: Fault
    phase: str
    step: int
    start: int


@dataclass(slots=True, kw_only=True)
class Storm:
    """A run that is disturbed until its time is over; started again whenever its exit code asks for it."""

    work: Path
    generator: random.Random
    ends_s: float
    """By `time.monotonic`."""
    began_s: float = field(default_factory=time.monotonic)
    hits: list[Hit] = field(default_factory=list)
    samples: list[Usage] = field(default_factory=list)
    num_starts: int = 0
    num_hung: int = 0
    """Starts that were killed, because no step had ended for `HANG_S`."""

    @property
    def run_dir(self) -> Path:
        """Of the disturbed run."""
        return self.work / "stormy"

    def run(self) -> None:
        """Return once the run has stopped on request.

        Raises:
            SystemExit: it ended with a code that asks for no new start.
        """
        line = [
            *(sys.executable, "-m", "launcher", "run", "examples/arithmetic/rl.yaml", *KEYS, f"num_steps={NEVER}"),
            *(f"model={self.work / 'warm'}", f"run_dir={self.run_dir}"),
            f"data.train.0.path={self.work / 'data' / 'train.jsonl'}",
        ]
        with self.run_dir.with_suffix(".log").open("wb") as log:
            while True:
                self.num_starts += 1
                process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
                ended = threading.Event()
                beside = [threading.Thread(target=each, args=(process, ended)) for each in (self._disturb, self._watch)]
                for thread in beside:
                    thread.start()
                code = process.wait()
                ended.set()
                for thread in beside:
                    thread.join()
                if code == Ending.STOPPED.code:
                    return
                if code not in AGAIN:
                    text = self.run_dir.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
                    raise SystemExit(f"exit code {code} after {self.hits[-1:]}:\n{text[-3000:]}")

    def rows(self, steps: Sequence[dict[str, float]]) -> list[Row]:
        """A row for each fault, with the seconds until a step ended after it."""
        rows: list[Row] = []
        for hit in self.hits:
            ends = [row["time_s"] for row in steps if row["time_s"] > hit.time_s]
            row: dict[str, str | int | float | bool] = {
                "second": round(hit.second, 1),
                "role": hit.role,
                "fault": hit.fault,
                "phase": hit.phase,
                "step": hit.step,
                "start": hit.start,
            }
            rows.append(row | ({"until_next_step_s": round(ends[0] - hit.time_s, 1)} if ends else {}))
        return rows

    def _disturb(self, process: subprocess.Popen[bytes], ended: threading.Event) -> None:
        """Send signals until the run ends; after the time is over, ask it to stop."""
        while not ended.wait(self.generator.uniform(*PAUSE_S)):
            if time.monotonic() > self.ends_s:
                write_request(self.run_dir, reason="the time of the soak is over")
                return
            self._hit(process)

    def _hit(self, process: subprocess.Popen[bytes]) -> None:
        kinds = [(role, fault) for role in ROLES for fault in SIGNALS if (role, fault) != ("controller", "freeze")]
        now = read_now(self.run_dir)
        for role, fault in self.generator.sample(kinds, k=len(kinds)):  # until a kind of process is there
            if now is not None and (found := targets(process, role)):
                hit = Hit(
                    second=time.monotonic() - self.began_s,
                    time_s=time.time(),
                    role=role,
                    fault=fault,
                    phase=now.phase,
                    step=now.step,
                    start=self.num_starts,
                )
                self.generator.choice(found).send_signal(SIGNALS[fault])
                self.hits.append(hit)
                print(hit, flush=True)
                return

    def _watch(self, process: subprocess.Popen[bytes], ended: threading.Event) -> None:
        metrics, stepped_s, size = self.run_dir / "metrics.jsonl", time.monotonic(), -1
        while not ended.wait(SAMPLE_S):
            self.samples.append(usage(process.pid, time.monotonic() - self.began_s))
            now = metrics.stat().st_size if metrics.exists() else 0
            if now != size:
                stepped_s, size = time.monotonic(), now
            elif time.monotonic() - stepped_s > HANG_S:
                self.num_hung += 1
                process.kill()
                return


def goals(
    calm: Sequence[dict[str, float]],
    stormy: Sequence[dict[str, float]],
    samples: Sequence[Usage],
    *,
    minutes: float,
    num_hung: int,
) -> list[Goal]:
    """Rewards of the same steps, and growth of resources from the second quarter of the time to the last."""
    last = min(int(calm[-1]["step"]), int(stormy[-1]["step"]))
    rewards = [
        [row["reward/mean"] for row in steps if last - COMPARED < row["step"] <= last] for steps in (calm, stormy)
    ]
    whole = len(stormy) if [int(row["step"]) for row in stormy] == list(range(len(stormy))) else 0
    end = samples[-1].seconds
    early = [sample for sample in samples if end / 4 <= sample.seconds < end / 2]
    late = [sample for sample in samples if sample.seconds >= 3 * end / 4]
    grown = growth(early, late)
    share = "of itself"
    return [
        Goal(name="minutes", value=minutes, bound=120.0, direction="at least", unit="min"),
        Goal(name="steps, each once", value=whole, bound=len(calm), direction="at least", unit="steps"),
        Goal(name="starts that hung", value=num_hung, bound=0, direction="at most", unit="starts"),
        Goal(
            name="reward of the same steps, disturbed minus undisturbed",
            value=statistics.fmean(rewards[1]) - statistics.fmean(rewards[0]),
            bound=-0.03,
            direction="at least",
            unit="reward",
        ),
        Goal(name="memory, growth", value=grown["memory_bytes"], bound=0.05, direction="at most", unit=share),
        Goal(name="descriptors, growth", value=grown["num_fds"], bound=0.03, direction="at most", unit=share),
        Goal(name="shared memory, growth", value=grown["shm_bytes"], bound=0.1, direction="at most", unit=share),
        Goal(name="files left in shared memory", value=len(left_behind()), bound=0, direction="at most", unit="files"),
    ]


if __name__ == "__main__":
    sys.exit(main())
