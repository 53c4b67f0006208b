"""Accuracy of the planner's simulator: the same schedules on two real engines and in simulation.

`python -m benchmarks.planner.real_engines --json OUT --run RUN [--quick] [--repeats 3]`: two vLLM engines on a core
each, with the product's pool, policies and admission. Each response is a group of one and has a given length: weights
are random, and only the length limit ends a response. The trainer is a sleep. Lengths are of two kinds:

    recorded    lengths are those of the traces in the run directory RUN. Forecasts are those that a run would make,
                and training takes the times recorded in RUN.
    drawn       lengths have a long tail, and forecasts a given correlation with them. Training takes half the time of
                saturated engines, a smaller share than in RUN, so the schedules differ more.

The time of a forward, from its start to the start of the next, is fitted to a run with other lengths of the same kind.
Then each scheme runs on the engines and in simulation with the same lengths. Rows hold the makespan and the share of
time in which an engine ran no forward. `saturated_s` is the time of full engines of the fitted speed. It bounds every
simulated schedule, not the real ones: engines can be faster than the fitted speed, for example with longer responses,
in which prompts weigh less.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import ray

from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.harness.record_inputs import run_inputs
from benchmarks.planner.engine_tasks import (
    MAX_TOKENS,
    MEAN_TOKENS,
    NUM_ENGINES,
    NUM_SLOTS,
    Task,
    drawn,
    recorded,
    saturated,
    window,
    workload,
)
from benchmarks.planner.simulator.engines import Speed
from benchmarks.planner.simulator.run import simulate
from benchmarks.planner.simulator.scheme import Cluster, Scheme, admission_of
from benchmarks.planner.simulator.speeds import from_cost_model
from history.drafting.forward_cost import ForwardCostModel, Observation
from launcher.cluster.processes import START_TIMEOUT_S, processes
from launcher.config.schema import ClusterConfig
from rollout.config import EngineConfig
from rollout.engine.spec import EngineSpec
from rollout.planning.admission import FixedBatches, FlexibleBatches
from rollout.planning.policies import plan
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.processes import ProcessId
from rollout.tracing.forwards import Forwards
from rollout.types import (
    EngineSlot,
    GroupId,
    Prompt,
    PromptGroup,
    PromptId,
    SamplingSpec,
    Score,
    ScoredGroup,
    ScorerAnswer,
    ScoreStatus,
)

PROMPT_TOKENS = 8
STEPS = {"recorded": 6, "drawn": 8}
LONGEST_GAP_S = 0.1
"""Longest time between the starts of two forwards of a busy engine."""
VOCABULARY, HIDDEN, LAYERS = 2048, 256, 6
SCHEMES = {
    "static": Scheme(policy="static"),
    "lpt": Scheme(policy="lpt"),
    "adaptive, overlap 1": Scheme(policy="adaptive", overlap=1, max_staleness=1),
    "flexible": Scheme(policy="flexible", overlap=2, max_staleness=3),
}


@ray.remote(num_cpus=0)
class Scorer:
    """Scores every response with 0."""

    def alive(self) -> ProcessId:
        """See `ScorerActor.alive`."""
        return ProcessId.of_this_process("")

    def score(self, group: PromptGroup, columns: object) -> ScorerAnswer:
        """One score per response."""
        del columns
        scores = tuple(Score(reward=0.0, status=ScoreStatus.OK) for _ in group.seeds)
        return ScorerAnswer(scores=scores, process=ProcessId.of_this_process(""))


@dataclass(slots=True, kw_only=True)
class Versioned:
    """An admission together with the published policy version; satisfies `rollout.pool.callbacks.Batches`."""

    admission: FixedBatches | FlexibleBatches
    version: int = 0

    def started(self, group_id: GroupId) -> None:
        """Record the start of a group at the current version."""
        self.admission.started(group_id, self.version)

    def completed(self, scored: ScoredGroup) -> None:
        """Passed on to the admission."""
        self.admission.completed(scored.group.group_id)

    def batch(self, step: int) -> list[GroupId] | None:
        """Passed on to the admission."""
        return self.admission.batch(step)

    def progress(self, step: int) -> tuple[int, int]:
        """Passed on to the admission."""
        return self.admission.progress(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Time of a run on the real engines, and its forwards."""

    makespan_s: float
    idle: float
    forwards: tuple[Forwards, ...]
    """Forwards of each engine."""


def write_model(directory: Path) -> None:
    """Write a small model with random weights and without an end-of-sequence token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """Engines, their pool, and the admission that the pool uses."""

    engines: EngineGroup
    batches: Versioned
    pool: EnginePool

    @classmethod
    def of(cls, engines: EngineGroup) -> "Real":
        """A pool around engines that have not sampled yet."""
        scorer: ray.actor.ActorClass = Scorer
        batches = Versioned(admission=admission_of(workload(0, num_steps=1), SCHEMES["static"]))
        pool = EnginePool(engines, [scorer.remote()], seats_per_engine=NUM_SLOTS, batches=batches)
        return cls(engines=engines, batches=batches, pool=pool)


def on_engines(real: Real, task: Task, scheme: Scheme) -> Measured:
    """Run a task on the engines under a scheme."""
    engines, batches, pool = real.engines, real.batches, real.pool
    work = task.work
    batches.admission = admission_of(work, scheme)
    engines.drain_trace(timeout_s=60)
    began = time.time()
    for step in range(work.num_steps):
        batches.version = step
        forecasts = batches.admission.due(step)
        groups = [_group(forecast.group_id, int(work.lengths[forecast.group_id, 0])) for forecast in forecasts]
        pool.admit(groups, plan(scheme.policy, forecasts, pool.loads()))
        pool.take_batch(step)
        with pool.run_in_background():
            time.sleep(task.train_s[step])
    makespan_s = time.time() - began
    forwards = tuple(engines.drain_trace(timeout_s=60).values())
    busy_s = sum(float(_durations(of_engine).sum()) for of_engine in forwards)
    return Measured(makespan_s=makespan_s, idle=1 - busy_s / (NUM_ENGINES * makespan_s), forwards=forwards)


def _durations(forwards: Forwards) -> np.ndarray:
    """[N] seconds from the start of each forward to the start of the next; its own duration before an idle time."""
    starts = forwards["started_at_s"]
    gaps = np.append(np.diff(starts), np.inf)
    return np.where(gaps < LONGEST_GAP_S, gaps, forwards["seconds"])


def _group(group_id: GroupId, num_tokens: int) -> PromptGroup:
    token_ids = np.random.default_rng(group_id).integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
    return PromptGroup(
        group_id=group_id,
        step=0,
        prompt=Prompt(
            prompt_id=PromptId(f"made-up/{group_id}"),
            data_source="made-up",
            token_ids=token_ids,
            ground_truth="",
            extra_info_json="null",
        ),
        sampling=SamplingSpec(temperature=1.0, max_response_tokens=num_tokens),
        seeds=(group_id,),
    )


def fitted(measured: Measured) -> Speed:
    """Speed of the engines, fitted to the forwards of a run.

    The cost model is fitted to forwards without prompts and is robust to single slow ones. It is then scaled so that
    its total equals the total time of all forwards, prompts included.
    """
    observed, running, context, seconds = [], list[int](), list[int](), list[float]()
    for forwards in measured.forwards:
        for row, duration in zip(forwards, _durations(forwards).tolist(), strict=True):
            running.append(min(int(row["num_running"]), NUM_SLOTS))
            context.append(int(row["num_context_tokens"]))
            seconds.append(duration)
            if row["num_running"] == row["num_scheduled_tokens"]:
                observed.append(Observation(running[-1], running[-1], context[-1], duration))
    shape = from_cost_model(ForwardCostModel.fitted(observed), NUM_SLOTS, context_tokens=int(MEAN_TOKENS))
    expected = shape.fixed_s[np.array(running)] + shape.context_s * np.array(context)
    factor = sum(seconds) / float(expected.sum())
    return replace(shape, fixed_s=factor * shape.fixed_s, context_s=factor * shape.context_s)


def compare(real: Real, speed: Speed, task: Task, *, lengths: str, repeat: int) -> Iterator[Row]:
    """One row per scheme: the same task on the engines and in simulation."""
    work = task.work
    cluster = Cluster(num_engines=NUM_ENGINES, num_slots=NUM_SLOTS, speed=speed, train_s=task.train_s, publish_s=0.0)
    for name, scheme in SCHEMES.items():
        measured = on_engines(real, task, scheme)
        simulated = simulate(work, cluster, scheme)
        simulated_s = simulated.step_s * work.num_steps
        yield {
            "lengths": lengths,
            "scheme": name,
            "repeat": repeat,
            "steps": work.num_steps,
            "responses": work.lengths.size,
            "mean_tokens": round(float(work.lengths.mean()), 1),
            "longest_tokens": int(work.lengths.max()),
            "saturated_s": round(saturated(work, speed), 2),
            "trainer_s": round(sum(task.train_s), 2),
            "makespan_s": round(measured.makespan_s, 2),
            "simulated_s": round(simulated_s, 2),
            "simulated_over_real": round(simulated_s / measured.makespan_s, 4),
            "idle": round(measured.idle, 4),
            "simulated_idle": round(simulated.idle, 4),
        }


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Goals for the gap between simulation and engines: of each scheme the median over its repeats, and the largest."""
    for lengths in STEPS:
        by_scheme: dict[str, list[Row]] = {}
        for row in rows:
            if row["lengths"] == lengths:
                by_scheme.setdefault(str(row["scheme"]), []).append(row)
        gaps = [[abs(float(row["simulated_over_real"]) - 1) for row in of_one] for of_one in by_scheme.values()]
        idle = [
            [abs(float(row["simulated_idle"]) - float(row["idle"])) for row in of_one] for of_one in by_scheme.values()
        ]
        for figure, gap, bound in (("makespan", gaps, 0.15), ("idle share", idle, 0.05)):
            yield Goal(
                name=f"{figure}, {lengths} lengths: simulated against real, worst scheme's median",
                value=max(map(statistics.median, gap)),
                bound=bound,
                direction="at most",
                unit="share",
            )


def main() -> int:
    """Start the engines, fit their speed, compare all schemes and write the record."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--run", type=Path, required=True, help="directory of a run with traces")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/bench/planner_engines"))
    options = parser.parse_args()
    steps, repeats = (dict.fromkeys(STEPS, 2), 1) if options.quick else (STEPS, options.repeats)
    try:
        of_run = recorded(options.run)
        windows = [window(of_run, number, num_steps=steps["recorded"]) for number in range(1 + repeats)]
    except (ValueError, OSError) as error:
        parser.error(f"--run: {error}")
    model = options.work / "model"
    write_model(model)
    config = EngineConfig(num_engines=NUM_ENGINES, max_num_seqs=NUM_SLOTS, kv_cache_bytes=256 << 20)
    specs = [
        EngineSpec(
            engine_id=number,
            run_id="benchmark",
            config=config,
            directory=str(model),
            max_model_len=PROMPT_TOKENS + MAX_TOKENS,
            load_from_directory=True,
        )
        for number in range(NUM_ENGINES)
    ]
    slots = [EngineSlot(engine_id=number, num_ranks=1, cpu_cores=1, num_gpus=0) for number in range(NUM_ENGINES)]
    rows: list[Row] = []
    with processes(ClusterConfig(), num_actors=NUM_ENGINES + 1, log_dir=None) as running:
        engines, starting = running.begin_engines(specs, slots)
        engines.finish_start(starting, timeout_s=START_TIMEOUT_S)
        real = Real.of(engines)
        for lengths in steps:
            is_recorded, num_steps = lengths == "recorded", steps[lengths]
            other = windows[0] if is_recorded else drawn(1000, num_steps=num_steps)
            for _ in range(2):  # the first run warms the engines up
                measured = on_engines(real, replace(other, train_s=(0.0,) * num_steps), SCHEMES["adaptive, overlap 1"])
            speed = fitted(measured)
            for repeat in range(1, repeats + 1):
                task = windows[repeat] if is_recorded else drawn(repeat, num_steps=num_steps, speed=speed)
                for row in compare(real, speed, task, lengths=lengths, repeat=repeat):
                    print(*row.values(), flush=True)
                    rows.append(row)
    write(
        options.json,
        rows=rows,
        goals=list(goals(rows)),
        not_measured=["any GPU"],
        inputs=run_inputs(options.run),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
