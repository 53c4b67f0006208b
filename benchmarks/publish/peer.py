"""The peer of `benchmarks.publish`: one rank gathers and sends BF16, and every engine quantises; a sum of parts."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.record import Row
from benchmarks.publish.cases import BUCKET_BYTES, ENGINES, TRAINERS, Case
from benchmarks.publish.parts import gather_s, quantise_s, transfer_s
from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import read_model_spec
from megatron_rl.weights.reshard_plan import plan_reshard
from rollout.weights.format import WeightFormat

PARTS = ("gather_s", "send_s", "quantise_s")


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
    ratios = [publish["timing_s/publish_deliver"] / total for publish, total in zip(publishes, totals, strict=True)]
    return {
        "kind": "peer",
        **{name: row[name] for name in ("trainer", "engines", "format", "transport")},
        **{part: statistics.median(publish[part] for publish in publishes) for part in PARTS},
        "apply_s": apply_s,
        "deliver_s": statistics.median(totals),
        "ours_over_peer": statistics.median(ratios),
    }
