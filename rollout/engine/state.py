"""What others see of an engine: its state, its counters, and the two ways in which a publish can fail."""

import enum
from dataclasses import dataclass

from rollout.types import WeightVersion


class EngineStatus(enum.Enum):
    """What an engine may do now."""

    SERVING = "serving"
    PAUSED = "paused"
    APPLYING = "applying"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine's state as others see it."""

    status: EngineStatus
    weight_version: WeightVersion
    """Of the last weights that were whole: during an update, and when fenced, still the old ones."""
    held: bool
    """Groups wait for `release()` though the engine may be serving."""
    fault: str
    """Why it is fenced; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start."""

    num_running: int
    """Responses in flight, waiting ones included."""
    num_finished: int
    num_tokens: int
    """Of finished responses."""
    num_updates: int
    num_refused: int
    """Publishes refused before anything was touched."""
    num_failed: int
    """Publishes that left the engine fenced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """How long one update took an engine, in seconds."""

    arrive_s: float
    """From the call until there was verified data: all of a staged publish, the first bucket of a streamed one."""
    pause_s: float
    """Until nothing was sampled any more."""
    apply_s: float
    """Until the weights were in place, with whatever still had to come."""
    num_in_flight: int
    """Responses that were in flight, waiting ones included."""
    num_recomputed_tokens: int
    """Tokens whose keys and values were thrown away with the old weights, and are computed anew."""


class WeightsRefusedError(RuntimeError):
    """A publish was refused before its first byte was applied: the old weights stay, the engine serves on."""


class EngineFencedError(RuntimeError):
    """A publish failed while it was applied: the engine samples nothing until the next full publish."""
