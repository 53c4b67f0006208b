"""Counts the restarts of a run's engines, or of its trainer, so that a crash loop ends the run.

A run of weeks loses a process now and then, and repairs each loss. Many of them over the whole run are no crash loop.
So only those count that lie close together, in steps that the run has finished.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_STEPS = 100
"""Finished steps after which a restart no longer counts.

A crash loop fails at the same step, or every few steps, so it reaches its limit well within them. Between losses that
lie further apart the run makes progress, and to end it would cost more than to repair them.
"""


@dataclass(slots=True, kw_only=True)
class RestartLimit:
    """Restarts of one kind of process. `note` mutates."""

    max_restarts: int
    """Most restarts that may count at a time."""
    newest_step: Callable[[], int]
    """Most steps that the run has ever finished; never falls. A trainer that repeats steps does not raise it until it
    passes the newest one. So restarts of a loop over the same steps all count."""
    _steps: list[int] = field(default_factory=list, init=False)
    """By restart, the newest step at that time."""

    @property
    def num_restarts(self) -> int:
        """All restarts since the start of the run."""
        return len(self._steps)

    @property
    def num_counted(self) -> int:
        """Restarts within the last `WINDOW_STEPS` finished steps."""
        newest = self.newest_step()
        return sum(newest - step < WINDOW_STEPS for step in self._steps)

    def note(self) -> None:
        """A process is restarted now."""
        self._steps.append(self.newest_step())
