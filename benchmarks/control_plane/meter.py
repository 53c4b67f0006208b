"""Seconds of CPU time of this process, by the part of the controller that spends them."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TypeVar, cast

from launcher.run_dir.recorder import RunRecorder
from megatron_rl.controller.controller import Recorder
from rollout.types import ScoredGroup

Target = TypeVar("Target")

ALL = "all"
"""Part of the whole process."""


class Meter:
    """Measures calls of wrapped objects; inner calls belong to the outermost part."""

    def __init__(self, created_bytes: Callable[[], int] = lambda: 0) -> None:
        """`created_bytes` are the bytes put into the object store since its start."""
        self._created_bytes = created_bytes
        self._created = [created_bytes()]
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._depth = 0
        self._began = time.process_time()
        self.steps: list[dict[str, float]] = []
        """Seconds of each finished step, by part, and of `ALL`."""

    def wrap(self, target: Target, parts: Mapping[str, str]) -> Target:
        """An object like `target` whose methods, by name, are measured as a part."""
        return cast(Target, Metered(target, self, parts))

    def measured(self, part: str, function: Callable[..., object]) -> Callable[..., object]:
        """`function`, measured."""

        def call(*arguments: object, **named: object) -> object:
            began = time.process_time()
            self._depth += 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._seconds[part] += time.process_time() - began

        return call

    def ending_steps(self, recorder: RunRecorder) -> Recorder:
        """A recorder that ends a step after each recorded step."""
        return cast(Recorder, _EachStep(recorder, self))

    def end_step(self) -> None:
        """Keep the seconds of a step and begin the next one."""
        self.steps.append({**self._seconds, ALL: time.process_time() - self._began})
        self._created.append(self._created_bytes())
        self._seconds, self._began = defaultdict(float), time.process_time()

    @property
    def stored_bytes(self) -> list[int]:
        """Bytes put into the object store in each finished step."""
        return [after - before for before, after in pairwise(self._created)]


class Metered:
    """Passes everything on; some methods are measured."""

    def __init__(self, target: object, meter: Meter, parts: Mapping[str, str]) -> None:
        self._target = target
        self._meter = meter
        self._parts = parts

    def __getattr__(self, name: str) -> object:
        found = getattr(self._target, name)
        return self._meter.measured(self._parts[name], found) if name in self._parts else found


class _EachStep:
    """A recorder that ends the step of a meter after each recorded step."""

    def __init__(self, recorder: RunRecorder, meter: Meter) -> None:
        self._recorder = recorder
        self._meter = meter

    def __getattr__(self, name: str) -> object:
        return getattr(self._recorder, name)

    def save(self, *_: object) -> None:
        """Stand-ins have nothing to save."""

    def on_step(self, step: int, metrics: dict[str, float], groups: list[ScoredGroup]) -> None:
        """Record a step."""
        self._recorder.on_step(step, metrics, groups)
        self._meter.end_step()
