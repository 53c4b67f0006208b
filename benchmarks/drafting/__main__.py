"""The product's drafter against other drafting methods on the same responses, without an engine.

`python -m benchmarks.drafting --json OUT [--traces FILE] [--arctic build/arctic] [--quick]`. FILE is a jsonl file of
`history.store.traces`, or a folder of such files like `traces/` of a run directory. The other responses are generated
by two models of how responses change (`benchmarks.drafting.traces`, `benchmarks.drafting.phrases`), with several seeds.
Arctic runs with vLLM's defaults, and with the setting that is best on a seed that the other rows do not use.
`python -m benchmarks.drafting.baselines.arctic` builds Arctic. The benchmark takes about an hour on a quiet core.

Rows: `tokens` (drafted, accepted, tokens per forward, by visit; also of the choice of settings), `bound` (tokens per
forward of an oracle that always copies the best span), `insert`, `propose` (CPU time; methods alternate), `alone` (the
product only, wall clock, by threads), `attach`, `modelled` (all methods may draft as many tokens). In the other rows
drafts have at most 16 tokens, those of HistoSpec's paper 32 and those of Arctic with vLLM's defaults 24.
"""

import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drafting.baselines.arctic import DIRECTORY, VERSION
from benchmarks.drafting.baselines.arctic import load as load_arctic
from benchmarks.drafting.bound import bound_row
from benchmarks.drafting.costs import SURFACE, ModelledEngine, alone_rows, attach_row, load, propose_rows
from benchmarks.drafting.goals import TOKENS_GOALS, goals
from benchmarks.drafting.quality import (
    ARCTIC,
    ARCTIC_ONE_TREE,
    NGRAM,
    OURS,
    OURS_ALL,
    OURS_FIXED,
    PAPER,
    PAPER_K,
    RELEASED,
    Contestant,
    contestants,
    decode_visits,
    named_best,
    ours,
    quality_row,
    remember,
    visits,
)
from benchmarks.drafting.trace_sets import CASES, LONG_CASES, MISSED, OTHER_CASES, Case
from benchmarks.drafting.traces import CALIBRATION_SEED
from benchmarks.harness.record import Row, arguments, write
from benchmarks.harness.record_inputs import arctic_inputs, run_inputs
from history.drafting.forward_cost import ForwardCostModel
from history.store.traces import Trace, read_traces

CLOSEST = (ARCTIC, ARCTIC_ONE_TREE)
FORWARDS = 120
THREADS = (1, 2, 4)
SEEDS = (1, 2, 3, 4, 5)
TIMED_SEEDS = (1, 2, 3)
"""Seeds of the rows that cost most time."""
TIMED_REUSE = 0.87
MODELLED_REUSE = (0.93, 0.87, 0.76, 0.0)
MODELLED_K = PAPER_K
"""Largest draft of every method of the `modelled` rows: as large as the largest that any of them drafts by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of the benchmark."""

    lengths: dict[str, tuple[int, int]]
    """(tokens of a response, number of prompts) of the `tokens` rows, by name of the length."""
    timed_prompts: int
    """Prompts, of eight responses each, for the time rows; the largest batch is all responses."""
    modelled_batches: tuple[int, ...]
    modelled_tokens: int
    attached_bytes: int
    rounds: int
    seeds: tuple[int, ...]
    timed_seeds: tuple[int, ...]


FULL = Scale(
    lengths={"2k": (2000, 16), "16k": (16000, 3)},
    timed_prompts=32,
    modelled_batches=(1, 4, 16, 64),
    modelled_tokens=2000,
    attached_bytes=100 << 20,
    rounds=FORWARDS,
    seeds=SEEDS,
    timed_seeds=TIMED_SEEDS,
)
QUICK = Scale(
    lengths={"2k": (400, 2), "16k": (1500, 1)},
    timed_prompts=2,
    modelled_batches=(1, 4),
    modelled_tokens=400,
    attached_bytes=2 << 20,
    rounds=10,
    seeds=SEEDS[:1],
    timed_seeds=SEEDS[:1],
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rows and write the record."""
    parser = arguments("Tokens per forward, time and memory of drafting methods.")
    parser.add_argument("--traces", type=Path, help="recorded traces: a jsonl file or a folder of them")
    parser.add_argument(
        "--arctic", type=Path, default=DIRECTORY, help="build directory of benchmarks.drafting.baselines.arctic"
    )
    options = parser.parse_args(argv)
    scale = QUICK if options.quick else FULL
    arctic = load_arctic(options.arctic)
    missing = [f"any GPU; modelled: {SURFACE}"]
    if arctic is None:
        missing.append(
            f"Arctic {VERSION}: not built (python -m benchmarks.drafting.baselines.arctic --build {options.arctic})"
        )
    if options.traces is None:
        missing.append("traces of a real run: none were given with --traces")
    inputs = [
        *(run_inputs(options.traces) if options.traces else ()),
        *(arctic_inputs(options.arctic) if arctic else ()),
    ]
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        field = contestants(Path(name), arctic)
        rows: list[Row] = []
        for part in (
            recorded(field, options.traces),
            generated(field, scale),
            costs(field, scale, Path(name)),
            modelled(contestants(Path(name), arctic, cap=MODELLED_K), scale, Path(name)),
        ):
            for row in part:
                rows.append(row)
                print(" ".join(str(value) for value in row.values()), flush=True)
    reached = [] if options.quick else goals(rows)
    write(options.json, rows=rows, goals=reached, not_measured=missing, inputs=inputs)
    return 0


def recorded(field: Sequence[Contestant], path: Path | None) -> Iterator[Row]:
    """Rows of the visits of a recorded run, for each method."""
    if path is None:
        return
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    traces = [trace for file in files for trace in read_traces(file)]
    if not traces:
        raise ValueError(f"{path} holds no traces; name a jsonl file of a run's traces/, or that folder")
    epochs = visits(traces)
    for contestant in field:
        for visit, outcome in enumerate(decode_visits(contestant, epochs)):
            yield quality_row("recorded", contestant.name, visit, outcome)


def generated(field: Sequence[Contestant], scale: Scale) -> Iterator[Row]:
    """Rows of drafted and accepted tokens on generated responses."""
    for case in (case for case in (*CASES, *OTHER_CASES, *LONG_CASES) if case.length in scale.lengths):
        num_tokens, num_prompts = scale.lengths[case.length]
        chosen = yield from calibrated(field, case, visits(case.generate(num_tokens, num_prompts, CALIBRATION_SEED)))
        for seed in scale.seeds:
            epochs = visits(case.generate(num_tokens, num_prompts, seed))
            for row in case_rows(field, case, epochs, chosen):
                yield {**row, "seed": seed}


def calibrated(
    field: Sequence[Contestant], case: Case, epochs: Sequence[Sequence[Trace]]
) -> Generator[Row, None, dict[int, str]]:
    """Rows of all settings of Arctic on other responses; returns the name of the best setting by visit."""
    rates: dict[int, dict[str, float]] = {}
    for contestant in field:
        if not contestant.is_arctic:
            continue
        first = 0 if case.is_first else 1
        for visit, outcome in enumerate(decode_visits(contestant, epochs, first=first), start=first):
            rates.setdefault(visit, {})[contestant.name] = outcome.tokens_per_forward
            row = quality_row(f"{case.name}, choice of settings", contestant.name, visit, outcome)
            yield {**row, "seed": CALIBRATION_SEED}
    return {visit: max(of_visit, key=lambda name: of_visit[name]) for visit, of_visit in rates.items()}


def case_rows(
    field: Sequence[Contestant], case: Case, epochs: Sequence[Sequence[Trace]], chosen: Mapping[int, str]
) -> Iterator[Row]:
    """Rows of one case and seed; epoch 0 is the same for all reuses of a model, so peers decode it at one."""
    yield bound_row(case.name, 1, epochs[0], epochs[1])
    if case.is_first:
        yield from (bound_row(case.name, 0, [], epochs[0], context=context) for context in range(4))
    if case.reuse == MISSED and not case.is_other:
        yield bound_row(f"{case.name}, history missing", 1, [], epochs[1])
    for contestant in field:
        if contestant.is_arctic and contestant.name not in (ARCTIC, *chosen.values()):
            continue
        if contestant.name == OURS_ALL and case.name not in TOKENS_GOALS:
            continue
        # the product learns from decoding epoch 0, as in a run
        first = (
            0
            if contestant.name in (OURS, OURS_ALL) or (case.is_first and contestant.name not in (PAPER, RELEASED))
            else 1
        )
        for visit, outcome in enumerate(decode_visits(contestant, epochs, first=first), start=first):
            row = quality_row(case.name, contestant.name, visit, outcome)
            yield from named_best(row, is_best=chosen.get(visit) == contestant.name)
        if case.reuse == MISSED and not case.is_other:
            yield from missed_rows(contestant, case, epochs, chosen)


def missed_rows(
    contestant: Contestant, case: Case, epochs: Sequence[Sequence[Trace]], chosen: Mapping[int, str]
) -> Iterator[Row]:
    """Rows of epoch 1 without the history of epoch 0."""
    if contestant.name in (NGRAM, PAPER, RELEASED, OURS_ALL):
        return
    for outcome in decode_visits(contestant, epochs[1:]):
        row = quality_row(f"{case.name}, history missing", contestant.name, 1, outcome)
        yield from named_best(row, is_best=chosen.get(1) == contestant.name)


def costs(field: Sequence[Contestant], scale: Scale, work: Path) -> Iterator[Row]:
    """Rows of the time and memory of inserting, drafting and attaching."""
    timed = [one for one in field if one.name != OURS_ALL and (not one.is_arctic or one.name in CLOSEST)]
    for case in (one for one in (*CASES, *LONG_CASES) if one.reuse == TIMED_REUSE and one.length in scale.lengths):
        for seed in scale.timed_seeds:
            old, new = visits(case.generate(scale.lengths[case.length][0], scale.timed_prompts, seed))
            for number, batch in enumerate(sorted({1, 8, len(new) // 4, len(new)})):
                # new methods for each batch, since a method learns from the responses that it decodes
                loaded = [load(case.name, contestant, old) for contestant in timed]
                rows = [method.row for method in loaded] if number == 0 else []
                rows += propose_rows(case.name, loaded, new, batch, rounds=scale.rounds)
                yield from ({**row, "seed": seed} for row in rows)
            for row in alone_rows(case.name, work, old, new, rounds=scale.rounds, threads=THREADS):
                yield {**row, "seed": seed}
    yield attach_row(work, scale.attached_bytes)


def modelled(field: Sequence[Contestant], scale: Scale, work: Path) -> Iterator[Row]:
    """Rows of the modelled engine: the product with a cost model and with a fixed threshold, and its peers.

    Raises:
        ValueError: a peer's largest draft is not that of the product, `MODELLED_K`.
    """
    peers = [contestant for contestant in field if contestant.name in (PAPER, RELEASED, ARCTIC, ARCTIC_ONE_TREE)]
    if odd := [peer.name for peer in peers if peer.max_draft_tokens != MODELLED_K]:
        raise ValueError(f"{', '.join(odd)}: the largest draft must be {MODELLED_K} tokens, as the product's")
    for case in CASES:
        if case.reuse not in MODELLED_REUSE:
            continue
        for seed in scale.timed_seeds:
            traces = case.generate(scale.modelled_tokens, 24, seed)
            for batch in scale.modelled_batches:
                old, new = (part[: max(8, 3 * batch)] for part in visits(traces))
                for row in modelled_rows(peers if case.reuse else [], case, work, batch, old, new):
                    yield {**row, "seed": seed}


def modelled_rows(
    peers: Sequence[Contestant], case: Case, work: Path, batch: int, old: Sequence[Trace], new: Sequence[Trace]
) -> Iterator[Row]:
    """Rows of one case, seed and batch size."""
    for peer in peers:
        method = peer.make()
        remember(method, old)
        engine = ModelledEngine(
            case=case.name, method_name=peer.name, method=method, max_draft_tokens=peer.max_draft_tokens
        )
        yield engine.decode(new, batch)
    for name, cost_model in ((OURS, ForwardCostModel()), (OURS_FIXED, None)):
        product = ours(work, cost_model=cost_model, k=MODELLED_K)
        engine = ModelledEngine(
            case=case.name, method_name=name, method=product, max_draft_tokens=MODELLED_K, cost_model=cost_model
        )
        # the drafter learns from the epoch before, as in a run
        engine.decode(old, batch)
        remember(product, old)
        yield engine.decode(new, batch)


if __name__ == "__main__":
    sys.exit(main())
