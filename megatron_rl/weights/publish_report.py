"""What one publish moved, how long its stages took, and how it was proven."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One publish to all engines."""

    weight_version: int
    wire_bytes: int
    """Bytes of all buckets."""
    stage_s: float
    """Reshard, quantise and pack (and send, where the transport streams), slowest trainer rank."""
    deliver_s: float
    """From the first rank's start to the last engine's new weights; includes `stage_s`."""
    probe_s: float
    probe_gaps: tuple[float, ...]
    """[engines] mean absolute difference of the probe prompt's log-probabilities, engine against trainer."""

    def metrics(self) -> dict[str, float]:
        """Flat metrics."""
        return {
            "publish/weight_version": float(self.weight_version),
            "publish/wire_bytes": float(self.wire_bytes),
            "timing_s/publish_stage": self.stage_s,
            "timing_s/publish_deliver": self.deliver_s,
            "timing_s/publish_probe": self.probe_s,
            "publish/probe_gap_max": max(self.probe_gaps),
        }
