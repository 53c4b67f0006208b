"""The peer of `benchmarks.publish`: BF16 gathered by one rank, sent whole, quantised by every engine; parts, summed."""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.publish_cases import BUCKET_BYTES, ENGINES, TRAINERS, row_key
from benchmarks.publish_parts import gather_s, quantise_s, transfer_s
from benchmarks.record import Row
from megatron_rl.config import ParallelConfig
from megatron_rl.model_config import read_model_spec
from megatron_rl.weights.reshard import plan_reshard
from rollout.weight_format import WeightFormat


class Peer:
    """What the same publishes would take in BF16, gathered by one rank and quantised by every engine."""

    def __init__(self, model: Path, *, count: int) -> None:
        """`count`: how often each part is measured."""
        self._model = model
        self.count = count
        self._whole = plan_reshard(
            read_model_spec(model),
            ParallelConfig(),
            format=WeightFormat(name="bf16"),
            bucket_bytes=BUCKET_BYTES,
            te_names=False,
        )
        # parts that cases share are measured once
        self._gather_s = functools.cache(self._gathering)
        self._send_s = functools.cache(self._sending)
        self._quantise_s = functools.cache(self._quantising)

    def rows(self, ours: Sequence[Row]) -> Iterator[Row]:
        """One for each of ours that published everything; of one case."""
        whole = [row for row in ours if row["kind"] == "publish"]
        (apply_s,) = (float(row["timing_s/publish_apply"]) for row in whole if row["transport"] == "shm")
        for row in whole:
            trainer, engines, format, transport = row_key(row)
            parts = {
                "gather_s": self._gather_s(trainer),
                "send_s": self._send_s(engines, transport),
                "quantise_s": self._quantise_s(engines, format),
                "apply_s": apply_s,
            }
            same = {name: row[name] for name in ("trainer", "engines", "format", "transport")}
            yield {"kind": "peer", **same, **parts, "deliver_s": sum(parts.values())}

    def _gathering(self, trainer: str) -> float:
        return self._median(lambda: gather_s(self._model, by_stage=TRAINERS[trainer].pipeline > 1))

    def _sending(self, engines: str, transport: str) -> float:
        num_engines, num_ranks = ENGINES[engines]
        return self._median(
            lambda: transfer_s(
                self._whole, num_engines=num_engines, num_ranks=num_ranks, transport=transport, plain=False
            )
        )

    def _quantising(self, engines: str, format: str) -> float:
        num_engines, num_ranks = ENGINES[engines]
        return self._median(lambda: quantise_s(self._model, format, num_engines=num_engines, num_ranks=num_ranks))

    def _median(self, measure: Callable[[], float]) -> float:
        return statistics.median(measure() for _ in range(self.count))
