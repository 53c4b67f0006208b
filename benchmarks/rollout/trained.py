"""Acceptance and losslessness of every method on a trained model that samples its own responses.

Part of `benchmarks.rollout`. It uses two checkpoints of one run, the warm start and the final policy. For several sets
of prompts, the stock engine samples a visit, which becomes the history. Then every method samples the next visit, once
with other seeds and once greedily. Before that, all engines sample warm-up prompts, from which the cost model learns.
Greedy responses are compared with those of the stock engine. In BF16 another batch shape rounds differently and may
decide a near-tie differently, in at most one prompt of a hundred.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from benchmarks.harness.record import Goal, Row
from benchmarks.rollout.client import EngineProcess, Setup, Speculation, engines
from benchmarks.rollout.goals import LOWER
from history.store.traces import Trace, read_traces, write_traces

NUM_GROUPS, GROUP_SIZE = 32, 8
NUM_SAMPLES = 10
"""Samples per checkpoint. At temperature 1 a sample takes a second or two of CPU time; a greedy one has an eighth of
the responses, takes a tenth to half a second, and is noisy."""
RESAMPLES = 2000
BATCH = 64
MAX_RESPONSE_TOKENS = 192
WARM_UPS = 10
"""Warm-up samples of some hundred forwards each, as many as a run has in two or three steps."""
_VISIT = 1000
"""Distance between the seeds of two visits; each response has a seed."""
MOST_DIFFERING = 0.01
SUFFIX = "suffix"
"""The peer with a goal of its own for greedy samples."""


def checkpoints(work: Path) -> dict[str, Path]:
    """The two models in the work directory of a quickstart. ValueError if there is none."""
    models = {"warm start": work / "warm", "final policy": work / "run" / "policy"}
    for directory in (*models.values(), work / "run" / "traces"):
        if not directory.exists():
            raise ValueError(f"--trained {work}: no {directory}; name the work directory of a quickstart")
    return models


def trained_rows(
    run: Path, methods: Sequence[str], work: Path, settings: Mapping[str, Speculation], *, quick: bool = False
) -> Iterator[Row]:
    """Rows of both checkpoints, for stock and peers with vLLM's sampler and with the product's."""
    num_groups, num_samples = (2, 1) if quick else (NUM_GROUPS, NUM_SAMPLES)
    known = _prompts(run / "run" / "traces", (1 + num_samples) * num_groups)
    warm_up, *groups = (
        [
            replace(trace, step=1, sample=number)
            for trace in known[start : start + num_groups]
            for number in range(GROUP_SIZE)
        ]
        for start in range(0, len(known), num_groups)
    )
    longest = max(len(trace.prompt_ids) for trace in known) + MAX_RESPONSE_TOKENS
    for (checkpoint, model), own in product(checkpoints(run).items(), (False, True)):
        setup = Setup(
            model=model, max_model_len=longest, max_num_seqs=BATCH, trained=True, own_sampler=own, settings=settings
        )
        with engines(methods, work, setup) as running:
            visit = _Visit.of("warm-up", warm_up, running["stock"], work, seed=0)
            for number in range(WARM_UPS):
                for engine in running.values():
                    visit.sample(engine, temperature=1.0, seed=_VISIT * (1 + number))
            for engine in running.values():
                visit.sample(engine, temperature=0.0, seed=0)
            for number, group in enumerate(groups):
                visit = _Visit.of("group", group, running["stock"], work, seed=_VISIT * (100 + 2 * number))
                for row in _sample_rows(visit, running, number, seed=_VISIT * (101 + 2 * number)):
                    yield {"history": checkpoint, "sampler": "product" if own else "vLLM", "sample": number, **row}


def _prompts(directory: Path, number: int) -> list[Trace]:
    """One trace of each of the first prompts of a run. ValueError if it had fewer."""
    known: dict[str, Trace] = {}
    for path in sorted(directory.glob("step-*.jsonl"), key=lambda path: int(path.stem.removeprefix("step-"))):
        known |= {trace.prompt_id: trace for trace in read_traces(path) if trace.prompt_id not in known}
        if len(known) >= number:
            return list(known.values())[:number]
    raise ValueError(f"--trained: {directory} has {len(known)} prompts, {number} are needed; run more steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """Files of the prompts, of each prompt once, and of the responses of the visit before."""

    asked: Path
    once: Path
    before: Path

    @classmethod
    def of(cls, name: str, asked: Sequence[Trace], stock: EngineProcess, work: Path, *, seed: int) -> Self:
        """Write the files; the stock engine samples the visit before."""
        visit = cls(**{part: work / f"trained-{name}-{part}.jsonl" for part in ("asked", "once", "before")})
        for path in (visit.asked, visit.once, visit.before):
            path.unlink(missing_ok=True)
        write_traces(visit.asked, asked)
        write_traces(visit.once, [trace for trace in asked if trace.sample == 0])
        write_traces(visit.before, [])
        _, responses = visit.sample(stock, temperature=1.0, seed=seed)
        answered = zip(asked, responses, strict=True)
        past = [replace(trace, step=0, response_ids=np.array(ids, dtype=np.int32)) for trace, ids in answered]
        write_traces(visit.before, past)
        return visit

    def sample(
        self, engine: EngineProcess, *, temperature: float, seed: int
    ) -> tuple[dict[str, float], list[list[int]]]:
        """The engine's figures and its responses; at temperature 0, one response per prompt."""
        prompts = self.asked if temperature else self.once
        return engine.sample(self.before, prompts, temperature=temperature, seed=seed, max_tokens=MAX_RESPONSE_TOKENS)


def _sample_rows(visit: _Visit, running: Mapping[str, EngineProcess], number: int, *, seed: int) -> Iterator[Row]:
    """Rows of all methods; at temperature 0 the stock engine comes first, and the others are compared with it."""
    methods = list(running)
    first = number % len(methods)
    for method in methods[first:] + methods[:first]:
        figures, _ = visit.sample(running[method], temperature=1.0, seed=seed)
        yield {"temperature": 1.0, "batch": BATCH, "method": method, **figures}
    stock: list[list[int]] = []
    for method in sorted(methods, key=lambda name: name != "stock"):
        figures, responses = visit.sample(running[method], temperature=0.0, seed=seed)
        stock = stock or responses
        yield {
            "temperature": 0.0,
            "batch": BATCH,
            "method": method,
            **figures,
            "num_responses": len(responses),
            "num_differing": sum(a != b for a, b in zip(stock, responses, strict=True)),
        }


def trained_goals(rows: Sequence[Row]) -> list[Goal]:
    """Goals: the product samples faster than the other methods, and changes greedy responses only at near-ties."""
    goals = []
    sampled = [row for row in rows if "temperature" in row]
    for checkpoint, sampler in dict.fromkeys((str(row["history"]), str(row.get("sampler", "vLLM"))) for row in sampled):
        of_both = [row for row in sampled if (row["history"], row.get("sampler", "vLLM")) == (checkpoint, sampler)]
        remark = "" if sampler == "vLLM" else f", {sampler}'s sampler for both"
        for temperature in (1.0, 0.0):
            of_one = [row for row in of_both if row["temperature"] == temperature]
            others = {"the best other's, stock included": best_other(of_one)}
            if temperature == 0 and any(row["method"] == SUFFIX for row in of_one):
                others[f"{SUFFIX}'s"] = SUFFIX
            setting = f"temperature {temperature:.0f}{remark}"
            for title, other in others.items():
                name = f"{checkpoint}: tokens per CPU second over {title}, {setting}, {LOWER}"
                over = lower_ratio(of_one, other)
                goals.append(Goal(name=name, value=over, bound=1.0, direction="at least", unit="x"))
        greedy = [row for row in of_both if row["method"] == "ours" and "num_differing" in row]
        differing, responses = (sum(int(row[name]) for row in greedy) for name in ("num_differing", "num_responses"))
        name = f"{checkpoint}: greedy responses that drafts changed{remark}"
        goals.append(
            Goal(name=name, value=differing / responses, bound=MOST_DIFFERING, direction="at most", unit="share")
        )
    return goals


def best_other(rows: Sequence[Row]) -> str:
    """The other method with the most tokens per CPU second of all samples together.

    It is the same in all samples: the best of each sample would be chosen by its noise.
    """
    others = sorted({str(row["method"]) for row in rows} - {"ours"})

    def rate(method: str) -> float:
        tokens, seconds = (_by_sample(rows, method, field).sum() for field in ("num_tokens", "cpu_s"))
        return float(tokens / seconds)

    return max(others, key=rate)


def lower_ratio(rows: Sequence[Row], other: str) -> float:
    """Lower 95 % bootstrap bound, over the samples, of all tokens per all CPU seconds over those of another method."""
    num_samples = len({int(row["sample"]) for row in rows})
    drawn = np.random.default_rng(0).integers(num_samples, size=(RESAMPLES, num_samples))
    ours, others = (
        _by_sample(rows, method, "num_tokens")[drawn].sum(axis=1) / _by_sample(rows, method, "cpu_s")[drawn].sum(axis=1)
        for method in ("ours", other)
    )
    return float(np.quantile(ours / others, 0.05))


def _by_sample(rows: Sequence[Row], method: str, field: str) -> npt.NDArray[np.float64]:
    """[S] sum of a field over a method's rows of each sample."""
    numbers = sorted({int(row["sample"]) for row in rows})
    of_method = [row for row in rows if row["method"] == method]
    return np.array([sum(float(row[field]) for row in of_method if row["sample"] == number) for number in numbers])
