"""The public state of an engine, its counters, and the two failures of a publish."""

import enum
from dataclasses import dataclass

from rollout.types import WeightVersion


class EngineStatus(enum.Enum):
    """State of an engine; see `rollout.engine.weights`."""

    SERVING = "serving"
    PAUSED = "paused"
    APPLYING = "applying"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Snapshot of an engine's state."""

    status: EngineStatus
    weight_version: WeightVersion
    """Version of the last complete weights: during an update, and when fenced, still the old version."""
    held: bool
    """Groups wait for `release()`, although the engine may be serving."""
    fault: str
    """Why the engine is fenced; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start."""

    num_running: int
    """Responses in flight, waiting responses included."""
    num_finished: int
    num_tokens: int
    """Tokens of finished responses."""
    num_updates: int
    num_refused: int
    """Publishes that were refused before a change."""
    num_failed: int
    """Publishes that left the engine fenced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProgress:
    """How far an engine is; it works as long as `num_tokens` changes."""

    num_tokens: int
    """Tokens emitted since the start, those of running responses included."""
    can_sample: bool
    """Whether it serves weights and is neither held nor paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """Durations of one weight update of an engine."""

    arrive_s: float
    """From the call to verified data: all of a staged publish, or the first bucket of a streamed publish."""
    pause_s: float
    """From then until sampling had stopped."""
    apply_s: float
    """From then until all weights were in place, including buckets that arrived later."""
    num_in_flight: int
    """Responses in flight at the pause, waiting responses included."""
    num_recomputed_tokens: int
    """Tokens whose keys and values were discarded with the old weights and are recomputed."""
    received_bytes: int
    """Bytes that came out of the transport, for the rank with the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProof:
    """What an engine found when it was asked to prove its new weights."""

    weight_gap: float
    """Largest relative difference of its weight sums from the trainer's (`rollout.weights.fingerprint_sums`)."""
    where: str
    """The tensor and the rows of that difference, in words."""
    logprobs: list[float]
    """Log-probabilities of the probe prompt's tokens after the first, at temperature 1."""


class WeightsRefusedError(RuntimeError):
    """A publish was refused before its first byte was applied: the engine continues with the old weights."""


class EngineFencedError(RuntimeError):
    """A publish failed during its application: the engine samples nothing until the next full publish."""
