"""What one publish moved, how long its stages took, and how it was proven."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.weights.quantization_stats import QuantizationStats, code_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One publish to all engines."""

    weight_version: int
    wire_bytes: int
    """Bytes of all buckets."""
    scales_s: float
    """Until ranks agreed on the scales that they share, slowest trainer rank."""
    pack_s: float
    """All other scales, cutting, quantising and writing into buckets, slowest trainer rank."""
    send_s: float
    """Checksums and handing over, slowest trainer rank; with a streaming transport while engines apply."""
    drain_s: float
    """Until responses were finished, where they are waited for; before anything below."""
    num_in_flight: int
    """Responses that the publish interrupted, waiting ones included, all engines."""
    num_recomputed_tokens: int
    """Tokens whose keys and values are computed anew after it, all engines."""
    pause_s: float
    """Until the slowest engine sampled nothing any more."""
    apply_s: float
    """Until the slowest engine had the weights in place, with whatever still had to come."""
    deliver_s: float
    """From the first rank's start to the last engine's new weights; includes all of the above."""
    probe_s: float
    weight_gaps: tuple[float, ...]
    """[engines] largest difference of a sum of weights (`rollout.weights.fingerprint`), engine against trainer."""
    probe_gaps: tuple[float, ...]
    """[engines] mean absolute difference of the probe prompt's log-probabilities, engine against trainer."""

    codes: Mapping[int, QuantizationStats]
    """What 8 bits cost the weights, by layer; empty in BF16."""

    def metrics(self) -> dict[str, float]:
        """Flat metrics."""
        return {
            "publish/weight_version": float(self.weight_version),
            "publish/wire_bytes": float(self.wire_bytes),
            "publish/in_flight": float(self.num_in_flight),
            "publish/recomputed_tokens": float(self.num_recomputed_tokens),
            "timing_s/publish_drain": self.drain_s,
            "timing_s/publish_scales": self.scales_s,
            "timing_s/publish_pack": self.pack_s,
            "timing_s/publish_send": self.send_s,
            "timing_s/publish_pause": self.pause_s,
            "timing_s/publish_apply": self.apply_s,
            "timing_s/publish_deliver": self.deliver_s,
            "timing_s/publish_probe": self.probe_s,
            "publish/weight_gap_max": max(self.weight_gaps),
            "publish/probe_gap_max": max(self.probe_gaps),
            **code_metrics(self.codes),
        }
