"""Acceptance and losslessness of every method on a trained model that samples for itself; for `benchmarks.rollout`.

For each of two checkpoints of one run, its warm start and its final policy: the stock engine samples a visit of some
prompts, which is the history; then every method samples the next visit with other seeds, and greedily. Before, all
engines sample other prompts: what a forward costs is learned from those. Greedy
responses are compared with the stock engine's: in BF16 a batch of another shape rounds differently, and so may draw
level at a near-tie, in at most one prompt of a hundred.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.engine_process import EngineProcess, engines
from benchmarks.record import Goal, Row
from history.traces import Trace, read_traces, write_traces

NUM_GROUPS, GROUP_SIZE = 32, 8
BATCH = 64
MAX_RESPONSE_TOKENS = 192
WARM_UPS = 10
"""Of some hundred forwards each, few of them without a prompt: a run has as many in two or three steps."""
FILES = ("none", "warm-up", "warm-up history", "group", "group history", "each")
MOST_DIFFERING = 0.01


def checkpoints(work: Path) -> dict[str, Path]:
    """The two models in the work directory of a quickstart. ValueError if there is none."""
    found = {"warm start": work / "warm", "final policy": work / "run" / "policy"}
    for directory in (*found.values(), work / "run" / "traces"):
        if not directory.exists():
            raise ValueError(f"--trained {work}: no {directory}; name the work directory of a quickstart")
    return found


def trained_rows(run: Path, methods: Sequence[str], work: Path, *, quick: bool = False) -> Iterator[Row]:
    """Rows of both checkpoints."""
    traces = list(read_traces(run / "run" / "traces" / "step-0.jsonl"))
    known = list({trace.prompt_id: trace for trace in traces}.values())
    num_groups = 2 if quick else NUM_GROUPS
    prompts, others = known[:num_groups], known[num_groups : 2 * num_groups]
    group, warm_up = (
        [replace(trace, step=1, sample=number) for trace in chosen for number in range(GROUP_SIZE)]
        for chosen in (prompts, others)
    )
    longest = max(len(trace.prompt_ids) for trace in known) + MAX_RESPONSE_TOKENS
    for checkpoint, model in checkpoints(run).items():
        with engines(methods, model, work, max_model_len=longest, max_num_seqs=BATCH, trained=True) as running:
            yield from _checkpoint_rows(checkpoint, running, warm_up, group, work)


def _checkpoint_rows(
    checkpoint: str,
    running: Mapping[str, EngineProcess],
    warm_up: Sequence[Trace],
    group: Sequence[Trace],
    work: Path,
) -> Iterator[Row]:
    files = {name: work / f"trained-{name}.jsonl" for name in FILES}
    for path in files.values():
        path.unlink(missing_ok=True)
    write_traces(files["none"], [])
    for name, asked in (("warm-up", warm_up), ("group", group)):
        write_traces(files[name], asked)
        _, before = running["stock"].sample(
            files["none"], files[name], temperature=1.0, seed=1, max_tokens=MAX_RESPONSE_TOKENS
        )
        answered = zip(asked, before, strict=True)
        past = [replace(trace, step=0, response_ids=np.array(ids, dtype=np.int32)) for trace, ids in answered]
        write_traces(files[f"{name} history"], past)
    write_traces(files["each"], [trace for trace in group if trace.sample == 0])
    for number in range(WARM_UPS):
        for engine in running.values():
            engine.sample(
                files["warm-up history"],
                files["warm-up"],
                temperature=1.0,
                seed=2_000_001 + number,
                max_tokens=MAX_RESPONSE_TOKENS,
            )
    stock: list[list[int]] = []
    for temperature, prompts in ((1.0, files["group"]), (0.0, files["each"])):
        for method in running:
            took, responses = running[method].sample(
                files["group history"], prompts, temperature=temperature, seed=1_000_001, max_tokens=MAX_RESPONSE_TOKENS
            )
            row: dict[str, str | int | float | bool] = {
                "history": checkpoint,
                "temperature": temperature,
                "batch": BATCH,
                "method": method,
                **took,
            }
            if temperature == 0.0:
                stock = responses if method == "stock" else stock
                row["num_responses"] = len(responses)
                row["num_differing"] = sum(a != b for a, b in zip(stock, responses, strict=True))
            yield row


def trained_goals(rows: Sequence[Row]) -> list[Goal]:
    """Drafts of ours make sampling faster than others do, and change no greedy response but at near-ties."""
    found = []
    for row in rows:
        if row["method"] != "ours" or "temperature" not in row:
            continue
        if "num_differing" in row:
            share = float(row["num_differing"]) / float(row["num_responses"])
            name = f"{row['history']}: greedy responses that drafts changed"
            found.append(Goal(name=name, value=share, bound=MOST_DIFFERING, direction="at most", unit="share"))
        else:
            peers = [
                float(other["tokens_per_cpu_s"])
                for other in rows
                if other.get("temperature") == 1.0 and other["history"] == row["history"] and other["method"] != "ours"
            ]
            name = f"{row['history']}: tokens per CPU second over the best other's, stock included, temperature 1"
            value = float(row["tokens_per_cpu_s"]) / max(peers)
            found.append(Goal(name=name, value=value, bound=1.0, direction="at least", unit="x"))
    return found
