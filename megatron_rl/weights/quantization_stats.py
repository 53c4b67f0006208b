"""Quantisation statistics of a publish, by layer: sums from every rank, and the metrics made from them.

Pure: the controller adds the sums up without torch. `megatron_rl.weights.quantization_error` measures them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_EXACT_DB = 300.0


class QuantizationStats(NamedTuple):
    """Sums over sampled codes. A tuple, because each publish brings one for each layer of each rank."""

    signal: float = 0.0
    """Sum of squared weights."""
    noise: float = 0.0
    """Sum of squared differences between weights and decoded codes."""
    num_codes: int = 0
    num_saturated: int = 0
    """Codes of the largest magnitude."""
    num_compared: int = 0
    """Codes whose value in the last published version is known."""
    num_changed: int = 0
    """Those of `num_compared` that differ from it."""
    num_as_is: int = 0
    """Codes of FP8 parameters sent unchanged."""
    num_requantised: int = 0
    """Codes of FP8 parameters quantised again, for other blocks or another format."""

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantisation-noise ratio in dB; 300 if the codes are exact."""
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else _EXACT_DB


def total(parts: Iterable[QuantizationStats]) -> QuantizationStats:
    """The sum of several."""
    columns = [sum(column) for column in zip(*parts, strict=True)]
    return QuantizationStats(*columns)  # type: ignore[arg-type]  # columns keep their types


def sum_stats(ranks: Iterable[Mapping[int, QuantizationStats]]) -> dict[int, QuantizationStats]:
    """Sums over all ranks, by layer."""
    parts: defaultdict[int, list[QuantizationStats]] = defaultdict(list)
    for rank in ranks:
        for layer, sums in rank.items():
            parts[layer].append(sums)
    return {layer: total(of_layer) for layer, of_layer in sorted(parts.items())}


def code_metrics(layers: Mapping[int, QuantizationStats]) -> dict[str, float]:
    """Metrics by name; empty if no layer has codes."""
    if not layers:
        return {}
    whole = total(layers.values())
    metrics = {f"publish/sqnr_db/layer_{layer}": sums.sqnr_db for layer, sums in layers.items()}
    metrics |= {
        "publish/sqnr_db_min": min(metrics.values()),
        "publish/sqnr_db": whole.sqnr_db,
        "publish/saturated_share": whole.num_saturated / whole.num_codes,
    }
    if whole.num_compared:
        metrics["publish/changed_share"] = whole.num_changed / whole.num_compared
    if were_fp8 := whole.num_as_is + whole.num_requantised:
        metrics["publish/as_is_share"] = whole.num_as_is / were_fp8
    return metrics
