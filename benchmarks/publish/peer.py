"""The peer of `benchmarks.publish`: BF16 gathered by one rank, sent whole, quantised by every engine; parts, summed."""

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
    """What the same publishes take in BF16, gathered by one rank and quantised by every engine."""

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
        """`PARTS` of one publish, in seconds.

        Each is measured twice, and the second time counts: the host of a virtual machine takes back memory that has
        been free for seconds, and whoever touches it first waits for it.
        """
        engines = dict(zip(("num_engines", "num_ranks"), ENGINES[case.engines], strict=True))
        parts = (
            partial(gather_s, self._model, by_stage=TRAINERS[case.trainer].pipeline > 1),
            partial(transfer_s, self._whole, **engines, transport=transport, plain=False),
            partial(quantise_s, self._model, case.format, **engines),
        )
        return {name: [measure() for _ in range(2)][-1] for name, measure in zip(PARTS, parts, strict=True)}


def peer_row(row: Row, found: Sequence[Mapping[str, float]], *, apply_s: float) -> Row:
    """The peer's row beside `row`, which is ours of the same case and transport.

    Args:
        row: says which.
        found: of each publish how long ours took, and `PARTS` measured right after it.
        apply_s: what an engine takes to load the format once it is there.
    """
    totals = [sum(one[part] for part in PARTS) + apply_s for one in found]
    ratios = [one["timing_s/publish_deliver"] / total for one, total in zip(found, totals, strict=True)]
    return {
        "kind": "peer",
        **{name: row[name] for name in ("trainer", "engines", "format", "transport")},
        **{part: statistics.median(one[part] for one in found) for part in PARTS},
        "apply_s": apply_s,
        "deliver_s": statistics.median(totals),
        "ours_over_peer": statistics.median(ratios),
    }
