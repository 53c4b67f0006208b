"""A publish of half a billion parameters: bytes, time and memory, compared with a plain copy and with BF16.

`python -m benchmarks.publish --json OUT --device cuda [--shapes 7B ..]`: `benchmarks.publish.on_device`.
`python -m benchmarks.publish --json OUT [--formats int8 ..] [--trainers TP2 ..] [--engines "1 x TP2" ..] [--resume]
[--quick]`: a model of random weights (hidden 1024, 32 layers, 16 x 64 query and 4 x 64 key/value heads, ffn 4096,
vocabulary 32k). The trainer has two ranks (TP2 or PP2); there are two engines of one rank or one engine of two. All
formats are sent through shared memory and sockets. A case takes some ten minutes; `--resume` keeps the cases of OUT.

Rows `publish`: one per trainer, engines, format and transport, medians over publishes. `total_s` is a whole publish,
`bare_s` one without the proof: no sums and no probe, so the engines do not serve it. Both are measured in turn, and
`proof_share` is the mean of `total_s / bare_s - 1` over the pairs, with its 95 % interval. Bytes are counted in the
transports: `publish/wire_bytes` were sent by trainer ranks, `publish/received_bytes_max` came to one engine rank. A
full publish has `own_shard_bytes` of its tensors. `transfer_s` is the time of the
same bytes through the same transport without quantising and loading, `plain_s` the same without checksums.
`peak_extra_bytes` is the largest growth of a process's resident memory, measured in processes that return freed memory
at once. `peak_bound_bytes` is two buckets and the largest layer's shard; shared memory adds the staged bytes.

Rows `delta`: over sockets, with the trainer TP2. Every 20th weight of every matrix has changed since the last publish
(`benchmarks.publish.changing_weights`), and only changes are sent.

Rows `peer`: one rank gathers all BF16 weights and sends them to every engine, which quantises them, as FlashRL and most
others do. The time is the sum of parts, measured right after each publish of the product while its processes are
stopped: gathering (`gather_s`), sending all BF16 weights to every engine rank (`send_s`), and quantising by all engine
ranks at once (`quantise_s`). `apply_s` is an engine's time to load the format, the median of the product's through
shared memory. `ours_over_peer` is the mean of the ratios without the proof, `proven_over_peer` with it, each with a
95 % interval. Both sides do everything twice, and the second time counts.

Rows `overlapped peer`, over sockets: a peer that gathers, sends, quantises and loads at the same time, at its best
bucket size (`benchmarks.publish.overlapped_peer`).
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from benchmarks.harness.record import Row, arguments, rows_before, write
from benchmarks.publish import on_device
from benchmarks.publish.cases import BUCKET_BYTES, ENGINES, TITLES, TRAINERS, TRANSPORTS, Case, row_key
from benchmarks.publish.judged import byte_figures, goals, peak_bounds
from benchmarks.publish.overlapped_peer import OverlappedPeer
from benchmarks.publish.parts import asleep, exact_memory, peak_extra, transfer_s, write_model
from benchmarks.publish.peer import OVERLAPPED, PARTS, Peer, interval, overlapped_row, peer_row
from launcher.cluster.processes import START_TIMEOUT_S, Processes, processes
from launcher.config.schema import ClusterConfig
from megatron_rl.config import AlgorithmConfig, PublishConfig, TrainerConfig
from megatron_rl.controller.delivery import ShmDelivery, StreamingDelivery, WeightDelivery
from megatron_rl.controller.publisher import Publisher
from megatron_rl.model.spec import read_model_spec
from megatron_rl.ranks import trainer_ranks
from megatron_rl.stages import PlugIn
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import TrainerSpec
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard
from rollout.config import EngineConfig, Format
from rollout.engine.spec import EngineSpec
from rollout.pool.engine_group import EngineGroup
from rollout.types import EngineSlot, WeightVersion
from rollout.weights.manifest import Required

RUN_ID = "benchmark"
TIMEOUT_S = 600.0
NUM_ROUNDS = 6
"""Rounds of two publishes with the proof and two without; the second of each counts, as in `Peer`."""
NUM_TRANSFERS = 3
"""Measurements of each transfer."""

DELTA_TRAINER = "TP2"
"""The trainer whose deltas are measured; they need a new start of all processes, which takes over a minute."""
CHANGING = "benchmarks.publish.changing_weights.clipped_surrogate"
"""Loss whose module changes the weights; only trainer ranks import it."""
PEAKS = tuple(f"peak_extra_bytes/{role}" for role in TITLES)
NOT_MEASURED = ("any GPU: NCCL, CUDA IPC", "more than one node: sockets are of one machine")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case and its peer, and write the record."""
    parser = arguments("Time, bytes and memory of a publish.")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/publish"))
    parser.add_argument("--formats", nargs="+", choices=get_args(Format), default=list(get_args(Format)))
    parser.add_argument("--trainers", nargs="+", choices=list(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--resume", action="store_true", help="keep the cases that OUT has")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", nargs="+", choices=list(on_device.SHAPES), default=["7B", "32B"])
    options = parser.parse_args(argv)
    if options.device == "cuda":
        rows = list(on_device.measure(options.shapes, options.formats, "cuda", options.work))
        measured = {(row["model"], row["format"]) for row in rows}
        more = ["NCCL between devices", "more than one engine rank"]
        more += [
            f"{shape} in {format}: trainer and engine need more memory than the device has"
            for shape in options.shapes
            for format in options.formats
            if (shape, format) not in measured
        ]
        write(options.json, rows=rows, goals=on_device.goals(rows), not_measured=more)
        return 0
    cases = [
        Case(trainer=trainer, engines=engines, format=format)
        for trainer in options.trainers
        for engines in options.engines
        for format in options.formats
    ]
    if options.quick:
        cases = [Case(trainer="TP2", engines="1 x TP2", format="int8")]
    model = write_model(options.work / "model", quick=options.quick)
    rows = rows_before(options.json, resume=options.resume)
    done = {row_key(row)[:3] for row in rows}
    for case in cases:
        if case.key not in done:
            rows += measure(case, model, options.work, quick=options.quick)
            write(options.json, rows=rows, not_measured=NOT_MEASURED)
    write(options.json, rows=rows, goals=[] if options.quick else goals(rows), not_measured=NOT_MEASURED)
    return 0


def measure(case: Case, model: Path, work: Path, *, quick: bool) -> Iterator[Row]:
    """Rows of one case."""
    num_rounds, num_transfers = (1, 1) if quick else (NUM_ROUNDS, NUM_TRANSFERS)
    num_engines, num_ranks = ENGINES[case.engines]
    named = {"trainer": case.trainer, "engines": case.engines, "format": case.format}
    overlapped = OverlappedPeer(model, case)
    measured, plan, required = publishes(
        case, model, work, rounds=num_rounds, beside=partial(_peers, Peer(model), overlapped, case)
    )
    apply_s = statistics.median(publish["timing_s/publish_apply"] for publish in measured["shm"])
    with exact_memory():
        peaks, _, _ = publishes(case, model, work, rounds=1)
    for transport, publishes_of in measured.items():
        times = {
            name: statistics.median(
                transfer_s(plan, num_engines=num_engines, num_ranks=num_ranks, transport=transport, plain=plain)
                for _ in range(num_transfers)
            )
            for name, plain in (("transfer_s", False), ("plain_s", True))
        }
        row: Row = {
            **{"kind": "publish", **named, "transport": transport},
            **times,
            **peak_bounds(case, model, plan, required, transport),
            **_medians(publishes_of),
            **byte_figures(plan, required, publishes_of),
            **interval("proof_share", [publish["total_s"] / publish["bare_s"] - 1 for publish in publishes_of]),
            **{name: max(publish[name] for publish in peaks[transport]) for name in PEAKS},
        }
        yield row
        yield peer_row(row, publishes_of, apply_s=apply_s)
        if transport == "gloo":
            yield overlapped_row(row, publishes_of, bucket_bytes=overlapped.bucket_bytes)
    if case.trainer != DELTA_TRAINER:
        return
    changed, _, _ = publishes(case, model, work, rounds=num_rounds, delta=True)
    row = _medians(changed["gloo"])
    whole = statistics.median(publish["publish/wire_bytes"] for publish in measured["gloo"])
    yield {"kind": "delta", **named, "transport": "gloo", "bytes_over_whole": row["publish/wire_bytes"] / whole, **row}


def _peers(peer: Peer, overlapped: OverlappedPeer, case: Case, transport: str) -> dict[str, float]:
    """Seconds of both peers' publishes."""
    seconds = peer.measure(case, transport)
    return seconds | {OVERLAPPED: overlapped.measure()} if transport == "gloo" else seconds


def _medians(publishes: Sequence[dict[str, float]]) -> dict[str, float]:
    names = publishes[0].keys() - {*PEAKS, *PARTS, OVERLAPPED}
    return {name: statistics.median(publish[name] for publish in publishes) for name in sorted(names)}


def publishes(
    case: Case,
    model: Path,
    work: Path,
    *,
    rounds: int,
    delta: bool = False,
    beside: Callable[[str], dict[str, float]] = lambda _: {},
) -> tuple[dict[str, list[dict[str, float]]], ReshardPlan, list[Required]]:
    """Metrics and memory peaks of the second publish of each round, by transport; the plan; the engines' requirements.

    With `delta`, weights change before each publish, and changes are sent over sockets. `beside` is called at the end
    of each round while nothing else runs; its figures are added to the metrics.
    """
    logs = (work / "logs").resolve()
    logs.mkdir(exist_ok=True)
    measured = {}
    with processes(ClusterConfig(object_store_bytes=128 << 20), num_actors=8, log_dir=logs) as running:
        trainer, engines = _start(case, model, running, delta=delta)
        required = engines.required(timeout_s=TIMEOUT_S)
        trainer.plan_publishes(required)
        plan = _plan(case, model, required, uses_te_layer_names=trainer.uses_te_layer_names())
        version = 0
        for transport in ("gloo",) if delta else TRANSPORTS:
            turns = Turns(trainer, engines, plan, model, transport, version)
            counted = []
            for number in range(rounds):
                figures = turns.round(proven_first=number % 2 == 0)
                with asleep(TITLES):
                    counted.append(figures | beside(transport))
            version = turns.version
            measured[transport] = counted
    return measured, plan, required


def _start(case: Case, model: Path, running: Processes, *, delta: bool) -> tuple[TrainerGroup, EngineGroup]:
    num_engines, num_ranks = ENGINES[case.engines]
    config = EngineConfig(
        num_engines=num_engines,
        tensor_parallel=num_ranks,
        format=case.format,
        bf16_first_layers=0,
        bf16_last_layers=0,
        max_num_seqs=8,
        kv_cache_bytes=64 << 20,
        update_timeout_s=TIMEOUT_S,
    )
    specs = [
        EngineSpec(engine_id=number, run_id=RUN_ID, config=config, directory=str(model), max_model_len=256)
        for number in range(num_engines)
    ]
    slots = [
        EngineSlot(engine_id=number, num_ranks=num_ranks, cpu_cores=1, num_gpus=0) for number in range(num_engines)
    ]
    engines, starting = running.begin_engines(specs, slots)
    parallel = TRAINERS[case.trainer]
    spec = TrainerSpec(
        model=str(model),
        run_id=RUN_ID,
        config=TrainerConfig(dtype="bf16", parallel=parallel),
        algorithm=AlgorithmConfig(loss=PlugIn(name=CHANGING)) if delta else AlgorithmConfig(),
        publish=PublishConfig(bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, delta=delta, delta_full_every=0),
        format=case.weight_format,
        temperature=1.0,
        max_response_tokens=128,
        total_updates=1,
        seed=0,
    )
    trainer = running.start_trainer(spec, trainer_ranks(parallel, cpu_threads=1))
    engines.finish_start(starting, timeout_s=START_TIMEOUT_S)
    return trainer, engines


def _plan(case: Case, model: Path, required: Sequence[Required], *, uses_te_layer_names: bool) -> ReshardPlan:
    return plan_reshard(
        read_model_spec(model),
        TRAINERS[case.trainer],
        format=case.weight_format,
        bucket_bytes=BUCKET_BYTES,
        uses_te_layer_names=uses_te_layer_names,
        required=required,
    )


class Turns:
    """Publishes over one transport, with the proof and without it in turn."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        plan: ReshardPlan,
        model: Path,
        transport: str,
        version: int,
    ) -> None:
        """Connect both sides; `version` is that of the next publish."""
        self._engines, self._plan = engines, plan
        self._delivery: WeightDelivery = ShmDelivery(trainer, engines, timeout_s=TIMEOUT_S)
        if transport == "gloo":
            self._delivery = StreamingDelivery(trainer, engines, source_ranks=plan.source_ranks, timeout_s=TIMEOUT_S)
        self._delivery.connect()
        self._publisher = _publisher(trainer, engines, self._delivery, plan, model)
        self.version = version

    def round(self, *, proven_first: bool) -> dict[str, float]:
        """Two publishes of each kind; metrics and memory peaks of the second of each."""
        figures: dict[str, float] = {}
        for _ in range(2):
            for proven in (proven_first, not proven_first):
                figures |= self._proven() if proven else self._bare()
        return figures

    def _proven(self) -> dict[str, float]:
        began = time.perf_counter()
        with peak_extra(TITLES) as peaks:
            report = self._publisher.publish(self.version)
            total_s = time.perf_counter() - began
        self.version += 1
        return report.metrics() | peaks | {"total_s": total_s}

    def _bare(self) -> dict[str, float]:
        """A publish without sums and probe; engines hold it and do not serve it."""
        manifest = self._plan.manifest(RUN_ID, WeightVersion(self.version))
        began = time.perf_counter()
        self._engines.check(manifest, timeout_s=TIMEOUT_S)
        self._delivery.deliver(manifest, lambda: None, with_sums=False)
        self.version += 1
        return {"bare_s": time.perf_counter() - began}


def _publisher(
    trainer: TrainerGroup, engines: EngineGroup, delivery: WeightDelivery, plan: ReshardPlan, model: Path
) -> Publisher:
    return Publisher(
        trainer,
        engines,
        delivery,
        plan=plan,
        run_id=RUN_ID,
        vocab_size=read_model_spec(model).vocab_size,
        probe_length=32,
        max_probe_gap=1.0,
        timeout_s=TIMEOUT_S,
    )


if __name__ == "__main__":
    sys.exit(main())
