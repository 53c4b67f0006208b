"""The directory of one run: its lock, its records and its checkpoints.

    config.yaml  environment.json  model.json  places.json  events.jsonl  evaluation.jsonl
    metrics.jsonl  metrics.abandoned.jsonl
    samples/step-N.jsonl  traces/  logs/  logs/stacks/  checkpoints/STEP/{trainer,history,lengths.npz,state.json}
    checkpoints/latest  status.json  policy/  wandb/  report.html  timeline.json  LOCK

Invariants: one process writes at a time (`LOCK`); `metrics.jsonl` holds each step at most once, in order; rows of steps
that a resume repeats move to `*.abandoned.jsonl`, none is lost; `checkpoints/latest` names a complete checkpoint or
does not exist; an incomplete checkpoint has the suffix `.partial`. What a run could not finish is removed when it ends,
and before the first write of the next start, because it may be what fills the disk.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from history.own_files import opener, refuse_planted_links
from launcher.checks.paths import folder_problems
from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import (
    Line,
    append_line,
    drop_torn_line,
    iterate_lines,
    read_rows,
    replace_rows,
    replace_text,
    sync_file,
    sync_folder,
)
from launcher.run_dir.checkpoints import Checkpoints
from launcher.run_dir.exported import remove_unfinished_export
from launcher.run_dir.forward_traces import drop_torn_record, remove_forwards
from launcher.run_dir.run_lock import RunLock
from launcher.run_dir.step_files import step_files
from rollout.evaluation import EvaluationRow

RECORDS = ("metrics.jsonl", "events.jsonl", "evaluation.jsonl")
"""Files to which the run appends."""
FOLDERS = ("samples", "traces", "logs", "checkpoints", "wandb")
Row = Mapping[str, object]


class RunDirectory:
    """An open run directory; a context manager that holds its lock."""

    def __init__(self, path: str | Path) -> None:
        """Creates the directory if it is missing, acquires its lock, and removes what an earlier start left unfinished.

        Raises `RunDirectoryError` if it cannot be created, if a living process, which the message names, holds it, or
        if another user has planted a link in it.
        """
        self.path = Path(path).absolute()
        if problems := folder_problems("run_dir", str(path)):
            raise RunDirectoryError(problems[0])
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, PermissionError) as error:
            raise RunDirectoryError(
                f"`run_dir` = {path} cannot be created: {error.strerror}; name another directory"
            ) from error
        try:
            refuse_planted_links(self.path)
        except PermissionError as error:
            raise RunDirectoryError(f"`run_dir` = {path}: {error}") from error
        self._lock = RunLock(self.path / "LOCK")
        self._checkpoints = Checkpoints(self.path / "checkpoints")
        self._remove_unfinished()
        for folder in FOLDERS:
            (self.path / folder).mkdir(exist_ok=True)
        for name in RECORDS:
            drop_torn_line(self.path / name)
        drop_torn_record(self.path / "traces")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes what is unfinished, and releases the lock; a second call does nothing.

        Call it after the run's processes have ended, which may write until then.
        """
        if not self._lock.is_held:
            return
        try:
            self._remove_unfinished()
        finally:
            self._lock.release()

    def _remove_unfinished(self) -> None:
        """Removes checkpoints, exports and samples that are not whole. An error leaves them to the next write there."""
        self._checkpoints.remove_unfinished()
        with suppress(OSError):
            remove_unfinished_export(self.path)
        for folder in ("samples", "traces"):
            for partial in (self.path / folder).glob("step-*.jsonl.partial"):
                with suppress(OSError):
                    partial.unlink()

    def write_config(self, text: str) -> None:
        """Saves the resolved configuration."""
        replace_text(self.path / "config.yaml", text)

    def write_environment(self, environment: Row) -> list[str]:
        """Saves versions, machine and the present time (`time_s`); those of earlier starts move to `earlier`.

        A damaged file is kept under another name; returns a sentence about it.
        """
        target, damaged = self.path / "environment.json", self.path / "environment.damaged.json"
        earlier, notes = list[object](), list[str]()
        if target.exists():
            try:
                previous = json.loads(target.read_text(encoding="utf-8"))
                earlier = [*previous.pop("earlier", []), previous]
            except (ValueError, AttributeError, TypeError):
                target.replace(damaged)
                notes = [f"{target.name} is damaged and now named {damaged.name}"]
        replace_text(target, json.dumps({**environment, "time_s": time.time(), "earlier": earlier}, indent=2) + "\n")
        return notes

    def append_metrics(self, step: int, metrics: Mapping[str, float], *, ended_s: float) -> None:
        """Appends a row to `metrics.jsonl`: the step, the wall clock at which it ended (`time_s`), the metrics."""
        append_line(self.path / "metrics.jsonl", {"step": step, "time_s": ended_s, **metrics})

    def metrics(self) -> list[dict[str, float]]:
        """All rows of `metrics.jsonl`."""
        return _floats(read_rows(self.path / "metrics.jsonl"))

    def move_damaged_lines(self) -> list[str]:
        """Moves lines of `metrics.jsonl` and `evaluation.jsonl` that hold no row of theirs to `*.abandoned.jsonl`.

        A run needs none of them. Returns a sentence for each file that had some.
        """
        notes = []
        for name in ("metrics", "evaluation"):
            path, aside = self.path / f"{name}.jsonl", self.path / f"{name}.abandoned.jsonl"
            damaged = [line for line in iterate_lines(path) if not _is_whole(line, name)]
            if not damaged:
                continue
            with open(aside, "ab", opener=opener) as file:
                file.write(b"".join(line.text for line in damaged))
            kept = (line.text for line in iterate_lines(path) if _is_whole(line, name))
            replace_text(path, b"".join(kept).decode())
            numbers = ", ".join(str(line.number) for line in damaged[:5])
            notes.append(f"{len(damaged)} damaged line(s) of {path.name} moved to {aside.name} (line {numbers})")
        return notes

    def resume_at(self, step: int) -> int:
        """Ends the records before `step`, the next step to run; returns the number of abandoned rows.

        Rows of `metrics.jsonl` and `evaluation.jsonl` that the run will write again move to `*.abandoned.jsonl`. The
        evaluation of the checkpoint's weights ended before the checkpoint was written, so it stays.
        """
        moved = 0
        for name, first in (("metrics", step), ("evaluation", step + 1 if step else 0)):
            rows = read_rows(self.path / f"{name}.jsonl")
            remaining = [row for row in rows if _step(row) < first]
            abandoned = [row for row in rows if _step(row) >= first]
            for row in abandoned:
                append_line(self.path / f"{name}.abandoned.jsonl", row)
            if abandoned:
                replace_rows(self.path / f"{name}.jsonl", remaining)
            moved += len(abandoned)
        return moved

    def record_span(self, actor: str, activity: str, start_s: float, end_s: float) -> None:
        """Appends a row to `events.jsonl`: an activity of an actor from `start_s` to `end_s` (wall clock)."""
        append_line(
            self.path / "events.jsonl", {"actor": actor, "activity": activity, "start_s": start_s, "end_s": end_s}
        )

    @contextmanager
    def span(self, actor: str, activity: str) -> Iterator[None]:
        """Records the time of the body as a span, also if it raises."""
        start_s = time.time()
        try:
            yield
        finally:
            self.record_span(actor, activity, start_s, time.time())

    def append_evaluation(self, rows: Iterable[Row]) -> None:
        """Appends rows to `evaluation.jsonl`; see `rollout.evaluation.EvaluationRow`."""
        for row in rows:
            append_line(self.path / "evaluation.jsonl", row)

    def evaluation(self) -> list[dict[str, object]]:
        """All rows of `evaluation.jsonl`."""
        return read_rows(self.path / "evaluation.jsonl")

    def samples_path(self, step: int) -> Path:
        """Path `samples/step-N.jsonl`, one row per response; a repeated step replaces its file."""
        return self.path / "samples" / f"step-{step}.jsonl"

    def traces_path(self, step: int) -> Path:
        """Path `traces/step-N.jsonl`, token ids of the step's responses (`history.store.traces`)."""
        return self.path / "traces" / f"step-{step}.jsonl"

    def begin_checkpoint(self, step: int) -> Path:
        """An empty partial folder for the checkpoint of `step`; incomplete checkpoints are removed."""
        return self._checkpoints.begin(step)

    def finish_checkpoint(self, step: int, keep_last: int) -> Path:
        """Renames the folder, lets `latest` name it, then begins to remove all but the newest `keep_last`.

        The records of the steps before it become durable first: a run resumes after this checkpoint even if the machine
        loses its power now.
        """
        try:
            previous, _ = self.latest_checkpoint() or (0, None)
        except RunDirectoryError:  # somebody has removed it, or changed `latest`; the new checkpoint mends that
            previous = 0
        steps = range(min(previous, step), step)
        records = [path for each in steps for path in (self.samples_path(each), self.traces_path(each))]
        for path in [*(self.path / name for name in RECORDS), *records]:
            sync_file(path)
        for folder in (self.path, self.path / "samples", self.path / "traces"):  # where those files are named
            sync_folder(folder)
        return self._checkpoints.finish(step, keep_last)

    def remove_samples(self, step: int, keep_last: int) -> None:
        """Removes samples and traces of steps before the last `keep_last` of `step` steps, but not of the first step.

        Forwards of engines before those steps go in whole files, those of the first step included. 0 removes none.
        """
        if not keep_last:
            return
        for folder in ("samples", "traces"):
            for number, path in step_files(self.path / folder):
                if 0 < number < step - keep_last:
                    path.unlink(missing_ok=True)
        remove_forwards(self.path / "traces", self._ended_s(step - keep_last - 1))

    def _ended_s(self, step: int) -> float:
        """When a step ended, wall clock; before all time for one that was not recorded."""
        rows = (line.row for line in iterate_lines(self.path / "metrics.jsonl"))
        ended_s = next((row.get("time_s") for row in rows if row is not None and row.get("step") == step), None)
        return float(ended_s) if isinstance(ended_s, int | float) else -math.inf

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint; None if there is none.

        Raises:
            RunDirectoryError: `checkpoints/latest` holds no step, or names a checkpoint that is gone.
        """
        return self._checkpoints.latest()


def _is_whole(line: Line, name: str) -> bool:
    """Whether a line is a row of metrics or of an evaluation."""
    if line.row is None or type(line.row.get("step")) is not int:
        return False
    if name == "evaluation":
        try:
            EvaluationRow.from_row(line.row)
        except TypeError:
            return False
    return True


def _step(row: Mapping[str, object]) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def _floats(rows: Iterable[Mapping[str, object]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if isinstance(value, int | float)} for row in rows]
