"""Sizes, times and checks of one publish."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.weights.quantization_stats import QuantizationStats, code_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One publish to all engines."""

    weight_version: int
    declines_delta: bool
    """Whether all weights were sent although deltas were asked for, because deltas would be slower."""
    wire_bytes: int
    """Bytes that trainer ranks gave to the transport, counted there (`Sender.sent_bytes`)."""
    received_bytes: int
    """Bytes that came out of the transport, for the engine rank with the most."""
    scales_s: float
    """Seconds for scales that trainer ranks share; the slowest rank."""
    pack_s: float
    """Seconds for all other scales, slicing, quantising and writing to buckets; the slowest trainer rank."""
    send_s: float
    """Seconds for checksums and sending; the slowest trainer rank. Streaming transports send while engines apply."""
    drain_s: float
    """Seconds until running responses had finished, before the delivery; 0 unless `publish.in_flight` is `drain`."""
    num_in_flight: int
    """Responses that the publish interrupted, waiting ones included; sum over engines."""
    num_recomputed_tokens: int
    """Tokens whose keys and values are recomputed after the publish; sum over engines."""
    pause_s: float
    """Seconds until the engine had stopped sampling; the slowest engine."""
    apply_s: float
    """Seconds until the engine had applied the weights, waiting for buckets included; the slowest engine."""
    deliver_s: float
    """Seconds from the start of the delivery until all engines have applied the weights. Includes all times above
    except `drain_s`."""
    sums_s: float
    """Seconds for sums while buckets were filled, part of `pack_s`; the slowest trainer rank."""
    probe_s: float
    """Seconds from the end of the delivery until all engines serve: the rest of the trainer's forward, comparing sums,
    the probe, and resuming."""
    weight_gaps: tuple[float, ...]
    """[engines] largest relative difference of weight sums (`rollout.weights.fingerprint`) from the trainer's."""
    probe_gaps: tuple[float, ...]
    """[engines] mean absolute difference of the probe prompt's log-probabilities from the trainer's, in nats."""
    codes: Mapping[int, QuantizationStats]
    """Quantisation statistics by layer; empty in BF16."""

    def metrics(self) -> dict[str, float]:
        """Metrics by name; docs/metrics.md lists units and reductions."""
        return {
            "publish/weight_version": float(self.weight_version),
            "publish/wire_bytes": float(self.wire_bytes),
            "publish/received_bytes_max": float(self.received_bytes),
            "publish/delta_declined": float(self.declines_delta),
            "publish/in_flight": float(self.num_in_flight),
            "publish/recomputed_tokens": float(self.num_recomputed_tokens),
            "timing_s/publish_drain": self.drain_s,
            "timing_s/publish_scales": self.scales_s,
            "timing_s/publish_pack": self.pack_s,
            "timing_s/publish_send": self.send_s,
            "timing_s/publish_pause": self.pause_s,
            "timing_s/publish_apply": self.apply_s,
            "timing_s/publish_deliver": self.deliver_s,
            "timing_s/publish_sums": self.sums_s,
            "timing_s/publish_probe": self.probe_s,
            "publish/weight_gap_max": max(self.weight_gaps),
            "publish/probe_gap_max": max(self.probe_gaps),
            **code_metrics(self.codes),
        }
