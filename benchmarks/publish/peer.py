"""The peer of `benchmarks.publish`: one rank gathers and sends BF16, and every engine quantises; a sum of parts."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.paired import Difference
from benchmarks.harness.record import Row
from benchmarks.publish.cases import BUCKET_BYTES, ENGINES, TRAINERS, Case
from benchmarks.publish.parts import gather_s, quantise_s, transfer_s
from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import read_model_spec
from megatron_rl.weights.reshard_plan import plan_reshard
from rollout.weights.format import WeightFormat

PARTS = ("gather_s", "send_s", "quantise_s")
OVERLAPPED = "overlapped_s"
"""Seconds of the peer that overlaps its parts."""
CASE = ("trainer", "engines", "format", "transport")


class Peer:
    """Measures the parts of a publish in which one rank gathers BF16 and every engine quantises it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._whole = plan_reshard(
            read_model_spec(model),
            ParallelConfig(),
            format=WeightFormat(name="bf16"),
            bucket_bytes=BUCKET_BYTES,
            uses_te_layer_names=False,
        )

    def measure(self, case: Case, transport: str) -> dict[str, float]:
        """Seconds of the `PARTS` of one publish.

        Each part is measured twice, and the second time counts. The host of a virtual machine takes back memory that
        has been free for seconds, so the first access waits for the host.
        """
        engines = dict(zip(("num_engines", "num_ranks"), ENGINES[case.engines], strict=True))
        parts = (
            partial(gather_s, self._model, by_stage=TRAINERS[case.trainer].pipeline > 1),
            partial(transfer_s, self._whole, **engines, transport=transport, plain=False),
            partial(quantise_s, self._model, case.format, **engines),
        )
        return {name: [measure() for _ in range(2)][-1] for name, measure in zip(PARTS, parts, strict=True)}


def peer_row(row: Row, publishes: Sequence[Mapping[str, float]], *, apply_s: float) -> Row:
    """The peer's row for the case and transport of `row`.

    Args:
        row: the product's row.
        publishes: metrics of each publish of the product, with the `PARTS` measured right after it.
        apply_s: seconds in which an engine loads the received format.
    """
    totals = [sum(publish[part] for part in PARTS) + apply_s for publish in publishes]
    return {
        "kind": "peer",
        **{name: row[name] for name in CASE},
        **{part: statistics.median(publish[part] for publish in publishes) for part in PARTS},
        "apply_s": apply_s,
        "deliver_s": statistics.median(totals),
        **compared(publishes, totals),
    }


def overlapped_row(row: Row, publishes: Sequence[Mapping[str, float]], *, bucket_bytes: int) -> Row:
    """The row of the peer that overlaps its parts, whose seconds were measured right after each publish."""
    totals = [publish[OVERLAPPED] for publish in publishes]
    return {
        "kind": "overlapped peer",
        **{name: row[name] for name in CASE},
        "bucket_bytes": bucket_bytes,
        "deliver_s": statistics.median(totals),
        **compared(publishes, totals),
    }


def compared(publishes: Sequence[Mapping[str, float]], peer_s: Sequence[float]) -> dict[str, float]:
    """Seconds of the product over those of a peer, without and with the proof, with the ends of 95 % intervals."""
    pairs = list(zip(publishes, peer_s, strict=True))
    return interval("ours_over_peer", [publish["bare_s"] / total for publish, total in pairs]) | interval(
        "proven_over_peer", [publish["total_s"] / total for publish, total in pairs]
    )


def interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean of some values and the ends of its 95 % interval; a single value has none."""
    if len(values) < 2:
        return {name: values[0]}
    difference = Difference.of(values)
    low, high = difference.interval
    return {name: difference.mean, f"{name}_low": low, f"{name}_high": high}
