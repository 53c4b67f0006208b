"""The product's drafter against other drafting methods on the same responses, without an engine.

`python -m benchmarks.drafting --json OUT [--traces FILE] [--arctic build/arctic] [--quick]`. FILE is a jsonl file of
`history.store.traces`, or a folder of such files like `traces/` of a run directory. The other responses are generated
(`benchmarks.drafting.traces`). `python -m benchmarks.drafting.baselines.arctic` builds Arctic. The benchmark takes ten
to fifteen minutes on a quiet core.

Rows: `tokens` (drafted, accepted, tokens per forward, by visit), `bound` (tokens per forward of an oracle that always
copies the best span), `insert`, `propose` (CPU time; methods alternate), `alone` (the product only, wall clock, by
threads), `attach`, `modelled`.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drafting.baselines.arctic import DIRECTORY, VERSION
from benchmarks.drafting.baselines.arctic import load as load_arctic
from benchmarks.drafting.bound import bound_row
from benchmarks.drafting.costs import SURFACE, ModelledEngine, alone_rows, attach_row, load, propose_rows
from benchmarks.drafting.quality import (
    ARCTIC,
    ARCTIC_ONE_TREE,
    GRID,
    NGRAM,
    OURS,
    OURS_FIXED,
    PAPER,
    PAPER_K,
    RELEASED,
    Contestant,
    contestants,
    decode_visits,
    ours,
    quality_row,
    remember,
    visits,
)
from benchmarks.drafting.traces import generate
from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.harness.record_inputs import arctic_inputs, run_inputs
from history.drafting.forward_cost import ForwardCostModel
from history.store.traces import read_traces

REUSE = (0.93, 0.87, 0.76)
LOW_REUSE = (0.6, 0.4, 0.2, 0.0)
MISSED = 0.87
"""Reuse at which epoch 1 is also decoded without the history of epoch 0."""
CLOSEST = (ARCTIC, ARCTIC_ONE_TREE)
FORWARDS = 120
THREADS = (1, 2, 4)
TOKENS_GOALS = {
    ("2k", 0.93): (6.9, 1.17, 1.45),
    ("2k", 0.87): (4.4, 1.13, 1.40),
    ("2k", 0.76): (2.6, 1.03, 1.20),
    ("16k", 0.93): (7.0, 0.0, 0.0),
    ("16k", 0.87): (4.3, 0.0, 0.0),
}
"""Bounds: tokens per forward, ratio to Arctic's best, ratio to Arctic's default in vLLM."""
GRID_CASES = [("2k", reuse) for reuse in REUSE]
"""Cases in which all settings of Arctic run."""


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


FULL = Scale(
    lengths={"2k": (2000, 16), "16k": (16000, 3)},
    timed_prompts=32,
    modelled_batches=(1, 4, 16, 64),
    modelled_tokens=2000,
    attached_bytes=100 << 20,
    rounds=FORWARDS,
)
QUICK = Scale(
    lengths={"2k": (400, 2), "16k": (1500, 1)},
    timed_prompts=2,
    modelled_batches=(1, 4),
    modelled_tokens=400,
    attached_bytes=2 << 20,
    rounds=10,
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
            modelled(field, scale, Path(name)),
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
    for length, (num_tokens, num_prompts) in scale.lengths.items():
        for reuse in (*REUSE, *LOW_REUSE) if length == "2k" else REUSE[:2]:
            generation = generate(reuse=reuse, num_tokens=num_tokens, num_prompts=num_prompts)
            epochs = visits(generation.traces)
            case = _case(length, reuse)
            yield bound_row(case, 1, epochs[0], epochs[1])
            if reuse == REUSE[0]:
                yield from (bound_row(case, 0, [], epochs[0], context=context) for context in range(4))
            if reuse == MISSED:
                yield bound_row(f"{case}, history missing", 1, [], epochs[1])
            for contestant in field:
                if contestant.is_arctic and contestant.name not in CLOSEST and (length, reuse) not in GRID_CASES:
                    continue
                # the product learns from decoding epoch 0, as in a run; the others decode it at one reuse only
                cold = contestant.name == OURS or (reuse == REUSE[0] and contestant.name in (NGRAM, *CLOSEST))
                first = 0 if cold else 1
                for visit, outcome in enumerate(decode_visits(contestant, epochs, first=first), start=first):
                    yield {**quality_row(case, contestant.name, visit, outcome), "reuse": round(generation.reuse, 4)}
                if reuse == MISSED and contestant.name in (OURS, *CLOSEST):
                    for outcome in decode_visits(contestant, epochs[1:]):
                        yield quality_row(f"{case}, history missing", contestant.name, 1, outcome)


def costs(field: Sequence[Contestant], scale: Scale, work: Path) -> Iterator[Row]:
    """Rows of the time and memory of inserting, drafting and attaching."""
    timed = [contestant for contestant in field if not contestant.is_arctic or contestant.name in CLOSEST]
    for length, (num_tokens, _) in scale.lengths.items():
        case = _case(length, 0.87)
        old, new = visits(generate(reuse=0.87, num_tokens=num_tokens, num_prompts=scale.timed_prompts).traces)
        for number, batch in enumerate(sorted({1, len(new) // 4, len(new)})):
            # new methods for each batch, since a method learns from the responses that it decodes
            loaded = [load(case, contestant, old) for contestant in timed]
            if number == 0:
                yield from (method.row for method in loaded)
            yield from propose_rows(case, loaded, new, batch, rounds=scale.rounds)
        yield from alone_rows(case, work, old, new, rounds=scale.rounds, threads=THREADS)
    yield attach_row(work, scale.attached_bytes)


def modelled(field: Sequence[Contestant], scale: Scale, work: Path) -> Iterator[Row]:
    """Rows of the modelled engine: the product with a cost model and with a fixed threshold, and its peers."""
    peers = [contestant for contestant in field if contestant.name in (PAPER, RELEASED, *CLOSEST)]
    for reuse in (*REUSE, 0.0):
        case = _case("2k", reuse)
        traces = generate(reuse=reuse, num_tokens=scale.modelled_tokens, num_prompts=24).traces
        for batch in scale.modelled_batches:
            old, new = (part[: max(8, 3 * batch)] for part in visits(traces))
            for peer in peers if reuse else []:
                method = peer.make()
                remember(method, old)
                engine = ModelledEngine(
                    case=case, method_name=peer.name, method=method, max_draft_tokens=peer.max_draft_tokens
                )
                yield engine.decode(new, batch)
            for name, cost_model in ((OURS, ForwardCostModel()), (OURS_FIXED, None)):
                product = ours(work, cost_model=cost_model, k=PAPER_K)
                engine = ModelledEngine(
                    case=case, method_name=name, method=product, max_draft_tokens=PAPER_K, cost_model=cost_model
                )
                # the drafter learns from the epoch before, as in a run
                engine.decode(old, batch)
                remember(product, old)
                yield engine.decode(new, batch)


def _case(length: str, reuse: float) -> str:
    return f"{length}, reuse {100 * reuse:.0f} %"


def goals(rows: Sequence[Row]) -> list[Goal]:
    """All goals for which there are rows."""
    return [*_recorded_goals(rows), *_tokens_goals(rows), *_cost_goals(rows), *_modelled_goals(rows)]


def _pick(rows: Sequence[Row], field: str, **wanted: str | int) -> list[float]:
    return [
        float(row[field])
        for row in rows
        if field in row and all(row.get(key) == value for key, value in wanted.items())
    ]


def _recorded_goals(rows: Sequence[Row]) -> list[Goal]:
    """Goal over all visits after the first."""
    later = [row for row in rows if row["case"] == "recorded" and int(row["visit"]) > 0]
    rates = {
        name: sum(_pick(later, "emitted", method=name)) / _row_forwards(later, name)
        for name in sorted({str(row["method"]) for row in later})
    }
    if len(rates) < 2:
        return []
    ratio = rates[OURS] / max(rate for name, rate in rates.items() if name != OURS)
    return [Goal(name="recorded: over the best peer", value=ratio, bound=1, direction="at least", unit="x")]


def _row_forwards(rows: Sequence[Row], name: str) -> float:
    of_method = [row for row in rows if row["method"] == name]
    return sum(float(row["emitted"]) / float(row["tokens_per_forward"]) for row in of_method)


def _tokens_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for (length, reuse), (bound, over_best, over_default) in TOKENS_GOALS.items():
        case = _case(length, reuse)
        of_case = {str(row["method"]): float(row["tokens_per_forward"]) for row in _of(rows, "tokens", case, visit=1)}
        tokens = of_case[OURS]
        yield Goal(name=f"{case}: tokens per forward", value=tokens, bound=bound, direction="at least", unit="tokens")
        peers = [value for name, value in of_case.items() if name in GRID]
        if over_best and peers:
            best, default = tokens / max(peers), tokens / of_case[ARCTIC]
            yield Goal(name=f"{case}: over Arctic's best", value=best, bound=over_best, direction="at least", unit="x")
            name = f"{case}: over Arctic's default"
            yield Goal(name=name, value=default, bound=over_default, direction="at least", unit="x")
    (cold,) = _pick(rows, "tokens_per_forward", case=_case("2k", 0.93), method=OURS, visit=0)
    yield Goal(name="epoch 0: tokens per forward", value=cold, bound=1.9, direction="at least", unit="tokens")
    errors = [
        _pick(rows, "calibration_error", case=_case(length, reuse), method=OURS, visit=1)[0]
        for length, reuse in TOKENS_GOALS
    ]
    yield Goal(name="calibration error, worst", value=max(errors), bound=0.02, direction="at most", unit="share")


def _of(rows: Sequence[Row], what: str, case: str, **wanted: str | int) -> list[Row]:
    of_case = [row for row in rows if row["what"] == what and row["case"] == case]
    return [row for row in of_case if all(row.get(key) == value for key, value in wanted.items())]


def _cost_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for length, bound in (("2k", 15), ("16k", 12)):
        of_case = _of(rows, "propose", _case(length, 0.87), batch=256)
        times = {str(row["method"]): float(row["us_per_request"]) for row in of_case}
        if ARCTIC in times:
            name = f"{length}: time of Arctic's default over ours"
            ratio = times[ARCTIC] / times[OURS]
            yield Goal(name=name, value=ratio, bound=bound, direction="at least", unit="x")
    whole = _pick(_of(rows, "propose", _case("16k", 0.87), batch=256), "ms_per_batch", method=OURS)[0]
    yield Goal(name="256 requests at 16k: propose", value=whole, bound=1.0, direction="at most", unit="ms")
    inserts = [row for row in rows if row["what"] == "insert"]
    size, build = (max(_pick(inserts, field, method=OURS)) for field in ("bytes_per_token", "ns_per_token"))
    yield Goal(name="history, worst", value=size, bound=10, direction="at most", unit="bytes a token")
    yield Goal(name="build, worst", value=build, bound=90, direction="at most", unit="ns a token")
    attach = _pick(rows, "ms", what="attach")[0]
    yield Goal(name="attach of 100 MB", value=attach, bound=0.1, direction="at most", unit="ms")


def _modelled_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    modelled = [row for row in rows if row["what"] == "modelled"]
    useless = _pick(modelled, "over_no_drafts", case=_case("2k", 0.0), method=OURS)
    name = "reuse 0: time over that of no drafts, worst batch"
    yield Goal(name=name, value=1 / min(useless), bound=1.02, direction="at most", unit="x")
    for batch in FULL.modelled_batches:
        ratios = [
            _pick(modelled, "tokens_per_s", case=_case("2k", reuse), batch=batch, method=OURS)[0]
            / _pick(modelled, "tokens_per_s", case=_case("2k", reuse), batch=batch, method=PAPER)[0]
            for reuse in REUSE
        ]
        yield Goal(
            name=f"modelled speed over HistoSpec's paper, batch {batch}",
            value=statistics.median(ratios),
            bound=1.25 if batch == 64 else 1.5,
            direction="at least",
            unit="x",
        )


if __name__ == "__main__":
    sys.exit(main())
