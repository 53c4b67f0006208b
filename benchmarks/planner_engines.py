"""Whether the simulator is to be believed: the same schedules on real engines and in simulation.

`python -m benchmarks.planner_engines --json OUT [--quick] [--repeats 3]`: two vLLM engines on a core each, under the
product's own pool, policies and admission. Every response is a group of its own and as long as it is told to be
(weights are random and nothing ends a response but its limit); the trainer is a sleep. What a forward costs, from its
start to the next one's, is fitted to a run with other lengths. Then each scheme runs on the engines and in simulation,
with the same lengths: makespan, and the share of time in which an engine ran nothing.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import ray

from benchmarks.record import Goal, Row, arguments, write
from benchmarks.simulator.bounds import saturated_s
from benchmarks.simulator.engines import Speed
from benchmarks.simulator.run import Cluster, Scheme, admission_of, simulate
from benchmarks.simulator.speeds import of_surface
from benchmarks.simulator.workload import Workload
from history.prices import Observation, PriceSurface
from launcher.config import ClusterConfig
from launcher.processes import START_TIMEOUT_S, processes
from rollout.admission import FixedBatches, FlexibleBatches
from rollout.config import EngineConfig
from rollout.engine_group import EngineGroup
from rollout.engine_spec import EngineSpec
from rollout.engine_trace import Forwards
from rollout.policies import plan
from rollout.pool import EnginePool
from rollout.types import EngineSlot, GroupId, Prompt, PromptGroup, PromptId, SamplingSpec, Score, ScoreStatus

NUM_ENGINES, NUM_SLOTS, WAVES = 2, 16, 2
PROMPT_TOKENS = 8
MEAN_TOKENS, MAX_TOKENS, SIGMA = 120.0, 640, 0.9
CORRELATION = 0.9
TRAIN_SHARE = 0.5
"""Of the time of saturated engines."""
LONGEST_GAP_S = 0.1
"""Between the starts of two forwards of an engine that has work."""
VOCABULARY, HIDDEN, LAYERS = 2048, 256, 6
SCHEMES = {
    "static": Scheme(policy="static"),
    "lpt": Scheme(policy="lpt"),
    "adaptive, overlap 1": Scheme(policy="adaptive", overlap=1, max_staleness=1),
    "flexible": Scheme(policy="flexible", overlap=2, max_staleness=3),
}


@ray.remote(num_cpus=0)
class Scorer:
    """Finds everything equally good."""

    def score(self, group: PromptGroup, columns: object) -> tuple[Score, ...]:
        """One reward for each response."""
        del columns
        return tuple(Score(reward=0.0, status=ScoreStatus.OK) for _ in group.seeds)


@dataclass(slots=True, kw_only=True)
class Versioned:
    """An admission as a pool sees it: it knows which version is published. Satisfies `rollout.pool.Batches`."""

    admission: FixedBatches | FlexibleBatches
    version: int = 0

    def started(self, group_id: GroupId) -> None:
        """Under the version of now."""
        self.admission.started(group_id, self.version)

    def completed(self, group_id: GroupId) -> None:
        """As it is."""
        self.admission.completed(group_id)

    def batch(self, step: int) -> list[GroupId] | None:
        """As it is."""
        return self.admission.batch(step)

    def progress(self, step: int) -> tuple[int, int]:
        """As it is."""
        return self.admission.progress(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run of the engines took."""

    makespan_s: float
    idle: float
    forwards: tuple[Forwards, ...]
    """By engine."""


def write_model(directory: Path) -> None:
    """A small model with random weights and without a token that ends a response."""
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


def workload(seed: int, *, num_steps: int) -> Workload:
    """Groups of one; forecasts are right to `CORRELATION`."""
    rng = np.random.default_rng(seed)
    per_step = NUM_ENGINES * NUM_SLOTS * WAVES
    own, noise = rng.standard_normal((2, num_steps * per_step))
    known = CORRELATION * own + np.sqrt(1 - CORRELATION**2) * noise
    median = MEAN_TOKENS / np.exp(SIGMA**2 / 2)
    return Workload(
        lengths=np.clip(np.round(median * np.exp(SIGMA * own)), 2, MAX_TOKENS)[:, None],
        forecasts=median * np.exp(SIGMA * CORRELATION * known),
        groups_per_step=per_step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """Engines with the pool that they keep, and what it asks for its batches."""

    engines: EngineGroup
    batches: Versioned
    pool: EnginePool

    @classmethod
    def of(cls, engines: EngineGroup) -> "Real":
        """Around engines that have sampled nothing."""
        scorer: ray.actor.ActorClass = Scorer
        batches = Versioned(admission=admission_of(workload(0, num_steps=1), SCHEMES["static"]))
        pool = EnginePool(engines, [scorer.remote()], slots_per_engine=NUM_SLOTS, batches=batches)
        return cls(engines=engines, batches=batches, pool=pool)


def on_engines(real: Real, work: Workload, scheme: Scheme, *, train_s_per_token: float) -> Measured:
    """One run under a scheme."""
    engines, batches, pool = real.engines, real.batches, real.pool
    batches.admission = admission_of(work, scheme)
    engines.call("drain_trace", timeout_s=60)
    began = time.time()
    for step in range(work.num_steps):
        batches.version = step
        forecasts = batches.admission.due(step)
        groups = [_group(forecast.group_id, int(work.lengths[forecast.group_id, 0])) for forecast in forecasts]
        pool.admit(groups, plan(scheme.policy, forecasts, pool.loads()))
        tokens = sum(scored.summary.lengths[0] for scored in pool.take_batch(step))
        with pool.aside():
            time.sleep(train_s_per_token * tokens)
    makespan_s = time.time() - began
    forwards = tuple(ray.get(engines.begin("drain_trace")))
    busy_s = sum(float(_durations(of_engine).sum()) for of_engine in forwards)
    return Measured(makespan_s=makespan_s, idle=1 - busy_s / (NUM_ENGINES * makespan_s), forwards=forwards)


def _durations(forwards: Forwards) -> np.ndarray:
    """Seconds from the start of each forward to the next one's, [N]; its own where the engine had nothing to do."""
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
    """What a forward costs, from those of a run in which every request decoded.

    The shape is fitted without regard to single slow forwards; then all of it is scaled to the time that they took
    together, prompts included.
    """
    seen, running, context, seconds = [], list[int](), list[int](), list[float]()
    for forwards in measured.forwards:
        for row, duration in zip(forwards, _durations(forwards).tolist(), strict=True):
            running.append(min(int(row["num_running"]), NUM_SLOTS))
            context.append(int(row["num_context_tokens"]))
            seconds.append(duration)
            if row["num_running"] == row["num_scheduled_tokens"]:
                seen.append(Observation(running[-1], running[-1], context[-1], duration))
    shape = of_surface(PriceSurface.fitted(seen), NUM_SLOTS, context_tokens=int(MEAN_TOKENS))
    expected = shape.fixed_s[np.array(running)] + shape.context_s * np.array(context)
    factor = sum(seconds) / float(expected.sum())
    return replace(shape, fixed_s=factor * shape.fixed_s, context_s=factor * shape.context_s)


def compare(real: Real, speed: Speed, seed: int, *, num_steps: int) -> Iterator[Row]:
    """Every scheme on the engines and in simulation, on the same lengths."""
    work = workload(seed, num_steps=num_steps)
    bound = saturated_s(
        work.lengths, fixed_s=speed.fixed_s, context_s=speed.context_s, gains=speed.gains, num_engines=NUM_ENGINES
    )
    train_s_per_token = TRAIN_SHARE * bound / float(work.lengths.sum())
    cluster = Cluster(
        num_engines=NUM_ENGINES,
        num_slots=NUM_SLOTS,
        speed=speed,
        train_s_per_token=train_s_per_token,
        publish_s=0.0,
    )
    for name, scheme in SCHEMES.items():
        measured = on_engines(real, work, scheme, train_s_per_token=train_s_per_token)
        simulated = simulate(work, cluster, scheme)
        simulated_s = simulated.step_s * work.num_steps
        yield {
            "scheme": name,
            "seed": seed,
            "steps": num_steps,
            "saturated_s": round(bound, 2),
            "makespan_s": round(measured.makespan_s, 2),
            "simulated_s": round(simulated_s, 2),
            "simulated_over_real": round(simulated_s / measured.makespan_s, 4),
            "idle": round(measured.idle, 4),
            "simulated_idle": round(simulated.idle, 4),
        }


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Medians over schemes and repeats."""
    gaps = [abs(float(row["simulated_over_real"]) - 1) for row in rows]
    idle = [abs(float(row["simulated_idle"]) - float(row["idle"])) for row in rows]
    yield Goal(
        name="makespan: simulated against real", value=statistics.median(gaps), bound=0.15, direction="at most",
        unit="share",
    )  # fmt: skip
    yield Goal(
        name="idle share: simulated against real", value=statistics.median(idle), bound=0.05, direction="at most",
        unit="share",
    )  # fmt: skip


def main() -> int:
    """Start engines, fit, compare, record."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/bench/planner_engines"))
    options = parser.parse_args()
    num_steps, repeats = (2, 1) if options.quick else (8, options.repeats)
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
        engines.wait(starting, "start", timeout_s=START_TIMEOUT_S)
        real = Real.of(engines)
        known = workload(1000, num_steps=num_steps)
        for _ in range(2):  # the first one warms up
            speed = fitted(on_engines(real, known, SCHEMES["adaptive, overlap 1"], train_s_per_token=0.0))
        for seed in range(1, repeats + 1):
            for row in compare(real, speed, seed, num_steps=num_steps):
                print(*row.values(), flush=True)
                rows.append(row)
    write(options.json, rows=rows, goals=list(goals(rows)), not_measured=["any GPU"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
