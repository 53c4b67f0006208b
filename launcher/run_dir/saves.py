"""The checkpoints that a run writes: begun at the end of a step, written while the run goes on, declared when whole.

A save begins with everything that belongs to the step: the trainer copies its state, and the controller's part, the
lengths and the history's snapshot are written at once. Then the ranks write from their copies. When all have ended, the
folder becomes the newest checkpoint. At most one save is under way; the next one waits for it.

Invariant: a checkpoint is the newest only after every file of every rank is on disk. If the trainer is lost before, the
one before stays the newest. The folder of a save that fails is removed by the next save, or when the run's processes
have ended, which may write until then.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from history.store.service import HistoryService
from launcher.run_dir.atomic_files import replace_text
from launcher.run_dir.checkpoints import WRITE, WRITER
from launcher.run_dir.directory import RunDirectory
from megatron_rl.algorithm.guard import GuardState
from megatron_rl.config import CheckpointConfig
from megatron_rl.trainer.group import TrainerGroup
from rollout.planning.planner import Planner

STATE = "state.json"
"""The controller's part of a checkpoint."""

LENGTHS = "lengths.npz"
"""Response lengths of each prompt; absent in checkpoints of older versions."""

HISTORY = "history"
"""Folder of a checkpoint with a snapshot of the history; absent if no engine drafts."""

LOOK_EVERY_S = 1.0
"""Interval at which a rollout asks whether the save is written."""
ANSWER_S = 1.0
"""Time in which idle ranks answer at the end of a step."""


@dataclass(slots=True, kw_only=True)
class _Save:
    """A save under way."""

    step: int
    trainer: TrainerGroup
    begun_at_s: float
    """Wall clock."""
    blocked_s: float = 0.0
    """In which the run has waited for this save."""


class Saves:
    """The checkpoints of a run, one at a time."""

    def __init__(
        self,
        directory: RunDirectory,
        config: CheckpointConfig,
        *,
        history: HistoryService | None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Without drafts no `history`."""
        self._directory = directory
        self._config = config
        self._history = history
        self._say = say
        self._save: _Save | None = None
        self._looked = 0.0
        self._finished: dict[str, float] = {}
        self._num_waits = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a save is begun and not finished."""
        return self._save is not None

    @property
    def in_background(self) -> bool:
        """Whether a save is written while the run goes on; if not, `begin` finishes it."""
        return self._config.background

    def begin(self, finished_steps: int, trainer: TrainerGroup, planner: Planner, guard: GuardState) -> None:
        """Begin a checkpoint, after the one before is finished.

        Raises:
            PlacedError: the trainer failed, in this save or the one before.
        """
        if self._save is not None:
            self._num_waits += 1
            self.finish()
        begun_at_s, started = time.time(), time.perf_counter()
        folder = self._directory.begin_checkpoint(finished_steps)
        trainer.begin_save(str(folder / "trainer"), background=self._config.background)
        self._save = _Save(step=finished_steps, trainer=trainer, begun_at_s=begun_at_s)
        order = planner.state().to_json()
        state = {"finished_steps": finished_steps, "prompt_order": order, "guard": guard.to_json()}
        replace_text(folder / STATE, json.dumps(state) + "\n")
        planner.lengths.save(folder / LENGTHS)
        if self._history is not None:
            self._history.save(folder / HISTORY)
        self._save.blocked_s += time.perf_counter() - started
        if not self._config.background:
            self.finish()

    def finish_if_written(self, *, is_step: bool) -> None:
        """Finish the save if all ranks have written; call it in rollouts, and when a step ends (`is_step`).

        Raises:
            PlacedError: the trainer failed, or a rank could not write.
        """
        if self._save is None or (not is_step and time.monotonic() - self._looked < LOOK_EVERY_S):
            return
        self._looked = time.monotonic()
        if self._save.trainer.save_is_written(wait_s=ANSWER_S if is_step else 0.0):
            self.finish()

    def finish(self) -> None:
        """Wait until the ranks have written, and make the checkpoint the newest; nothing if no save is under way.

        Raises:
            PlacedError: the trainer failed, or a rank could not write.
        """
        if self._save is None:
            return
        save, self._save, started = self._save, None, time.perf_counter()
        seconds = save.trainer.finish_save()
        final = self._directory.finish_checkpoint(save.step, self._config.keep_last)
        try:
            self._directory.remove_samples(save.step, self._config.keep_last_samples)
        except OSError as error:  # the checkpoint is whole, and the run goes on without that room
            self._say(f"older samples and traces could not be removed: {error}")
        if self._history is not None:
            self._history.saved(final / HISTORY)
        blocked_s = save.blocked_s + time.perf_counter() - started
        self._finished = {"checkpoint/save_s": seconds, "checkpoint/blocked_s": blocked_s}
        self._directory.record_span(WRITER, WRITE, save.begun_at_s, save.begun_at_s + seconds)

    def forget(self) -> None:
        """Give up the save under way, because its trainer is lost."""
        self._save = None

    def metrics(self) -> dict[str, float]:
        """Seconds of the save that was finished since the last call, if any, and all waits for a save."""
        finished, self._finished = self._finished, {}
        return finished | {"checkpoint/waits": float(self._num_waits)}


def read_state(checkpoint: Path) -> dict[str, object]:
    """The controller's part of a checkpoint: `finished_steps`, `prompt_order` and `guard`, which older ones lack."""
    state: dict[str, object] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state
