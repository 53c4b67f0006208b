"""What 8 bits cost a model's weights, layer by layer, at a publish: sums that ranks send, and what they say together.

Pure: the controller adds them up without torch. Gathered by `megatron_rl.weights.quantization_error`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

_EXACT_DB = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationStats:
    """Sums over sampled codes."""

    signal: float = 0.0
    """Squared weights."""
    noise: float = 0.0
    """Squared differences between weights and what their codes stand for."""
    num_codes: int = 0
    num_saturated: int = 0
    """Codes of the largest magnitude."""
    num_compared: int = 0
    """Codes of which the last publish's are known."""
    num_changed: int = 0
    """Of these, codes that differ from the last publish's."""
    num_as_is: int = 0
    """Codes that a parameter consists of, taken over."""
    num_requantised: int = 0
    """Codes made of weights that were FP8 already, in other blocks or another format."""

    def __add__(self, other: "QuantizationStats") -> "QuantizationStats":
        added = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        return QuantizationStats(**added)

    @property
    def sqnr_db(self) -> float:
        """Signal over quantisation noise in decibels; 300 where codes stand for all weights exactly."""
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else _EXACT_DB


def sum_stats(ranks: Iterable[Mapping[int, QuantizationStats]]) -> dict[int, QuantizationStats]:
    """By layer, over all ranks."""
    found: dict[int, QuantizationStats] = {}
    for rank in ranks:
        for layer, sums in rank.items():
            found[layer] = found.get(layer, QuantizationStats()) + sums
    return dict(sorted(found.items()))


def code_metrics(layers: Mapping[int, QuantizationStats]) -> dict[str, float]:
    """Flat metrics; empty where nothing has codes."""
    if not layers:
        return {}
    whole = sum(layers.values(), QuantizationStats())
    found = {f"publish/sqnr_db/layer_{layer}": sums.sqnr_db for layer, sums in layers.items()}
    found |= {
        "publish/sqnr_db_min": min(found.values()),
        "publish/sqnr_db": whole.sqnr_db,
        "publish/saturated_share": whole.num_saturated / whole.num_codes,
    }
    if whole.num_compared:
        found["publish/changed_share"] = whole.num_changed / whole.num_compared
    if were_fp8 := whole.num_as_is + whole.num_requantised:
        found["publish/as_is_share"] = whole.num_as_is / were_fp8
    return found
