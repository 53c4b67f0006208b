"""The phases of a step as context managers, which prepare devices for the phase and measure its time.

A `TrainPhasePolicy` sets what engines do while the trainer works. If both share devices, `Sharing` frees memory before
a phase. Implementations of both are in `megatron_rl.controller.colocation`. Every phase is a span (start and end on the
wall clock) in `events.jsonl`, and its seconds are a metric of the step, without those in which the job was stopped.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from megatron_rl.controller.suspension import Suspension

RecordSpan = Callable[[str, str, float, float], None]
"""Called with (actor, activity, start_s, end_s), wall clock."""


BeginPhase = Callable[[str, str], None]
"""Called with (actor, activity) when a phase begins."""


class Sharing(Protocol):
    """Frees memory on shared devices for the next phase (`megatron_rl.controller.colocation.DeviceSharing`)."""

    sleep: bool
    """Whether engines give up weights, keys and values while the trainer works."""
    asleep: bool
    """Whether engines hold no weights. A publish must come before they serve."""

    def to_trainer(self) -> None:
        """Call it before the trainer trains or saves."""
        ...

    def to_publish(self) -> None:
        """Call it before weights are sent."""
        ...


class TrainPhasePolicy(Protocol):
    """What engines with unfinished responses do while the trainer works (`megatron_rl.controller.colocation`)."""

    def trainer_works(self) -> AbstractContextManager[None]:
        """Context of training, saving and sending weights."""
        ...

    def engines_work(self) -> None:
        """Call it before waiting for responses of engines."""
        ...


class PhaseClock:
    """Seconds of a step's phases; every phase is recorded as a span. All methods mutate."""

    def __init__(self, record_span: RecordSpan, begin_phase: BeginPhase | None = None) -> None:
        self._record_span = record_span
        self._begin_phase = begin_phase
        self._seconds: dict[str, float] = {}
        self._step_started = time.perf_counter()
        self._stopped_before_s = 0.0
        """All stops before this step."""
        self._reported_s = self._seen_s = 0.0
        """All stops that the rows before this step have, and those that the newest row has."""
        self.suspension = Suspension()

    def begin_step(self) -> None:
        """Start counting the seconds of a step."""
        self._seconds = {}
        self._step_started = time.perf_counter()
        self._stopped_before_s = self.suspension.seconds()
        self._reported_s = self._seen_s

    def awake_s(self) -> float:
        """A clock without the time for which this job was stopped."""
        return time.perf_counter() - self.suspension.seconds()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since `begin_step`, and `step` for all of it; mutates.

        `suspended` is part of no other, and holds the stops since the row before: also those in an evaluation or a
        checkpoint between the steps.
        """
        self._seen_s = self.suspension.seconds()
        step_s = time.perf_counter() - self._step_started - (self._seen_s - self._stopped_before_s)
        return {**self._seconds, "step": step_s, "suspended": self._seen_s - self._reported_s}

    @contextmanager
    def phase(self, actor: str, activity: str) -> Iterator[None]:
        """Measure the body and record it as a span."""
        if self._begin_phase is not None:
            self._begin_phase(actor, activity)
        started_at, started = time.time(), time.perf_counter()
        stopped_before_s = self.suspension.seconds()
        try:
            yield
        finally:
            stopped_s = self.suspension.seconds() - stopped_before_s
            elapsed = time.perf_counter() - started
            self._seconds[activity] = self._seconds.get(activity, 0.0) + elapsed - stopped_s
            self._record_span(actor, activity, started_at, started_at + elapsed)


class Phases:
    """The phases of a run; each method is the context of one phase."""

    def __init__(self, clock: PhaseClock, sharing: Sharing | None = None, *, policy: TrainPhasePolicy) -> None:
        """Without `sharing`, trainer and engines stay in memory side by side."""
        self.clock = clock
        self._policy = policy
        self._sharing = sharing

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Engines sample responses and scorers score them."""
        self._policy.engines_work()
        with self.clock.phase("engines", "rollout"):
            yield

    @contextmanager
    def train(self, afterwards: Callable[[], object] = lambda: None) -> Iterator[None]:
        """The trainer trains. Then `afterwards` is called, while engines go on as before; it is no part of the span."""
        with self._policy.trainer_works():
            self._make_room()
            with self.clock.phase("trainer", "train"):
                yield
            afterwards()

    @contextmanager
    def publish(self) -> Iterator[None]:
        """Weights are sent to the engines."""
        with self._policy.trainer_works():
            if self._sharing is not None:
                with self.clock.phase("engines", "switch"):
                    self._sharing.to_publish()
            with self.clock.phase("publisher", "publish"):
                yield

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Engines sample evaluation sets."""
        self._policy.engines_work()
        with self.clock.phase("engines", "evaluate"):
            yield

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """The trainer copies its state for a checkpoint, or writes it."""
        with self._policy.trainer_works():
            self._make_room()
            with self.clock.phase("trainer", "checkpoint"):
                yield

    @property
    def needs_publish(self) -> bool:
        """Whether engines have lost their weights since the last publish."""
        return self._sharing is not None and self._sharing.asleep

    @property
    def engines_sleep(self) -> bool:
        """Whether engines give up weights, keys and values while the trainer works or saves."""
        return self._sharing is not None and self._sharing.sleep

    def _make_room(self) -> None:
        if self._sharing is not None:
            with self.clock.phase("trainer", "switch"):
                self._sharing.to_trainer()
