"""`status.json` in the run directory: the present phase of a run; and `megatron-rl status`, which reads files only.

The file is replaced whole: at each phase, every few seconds of a phase that counts its groups, and every half minute by
a thread. The thread knows only that the process exists, so it changes `alive_s` alone: the age of the phase and of the
last record still tell of a run that hangs. Any machine that sees the directory can read it; nothing is asked of the
run.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from history.own_files import opener
from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import left_out, readable_rows
from launcher.run_dir.checkpoints import Checkpoints
from launcher.run_dir.console import PHASES
from launcher.run_dir.stop_request import read_request

STATUS = "status.json"
WRITE_EVERY_S = 2.0
"""Of the progress within a phase."""
ALIVE_EVERY_S = 30.0
"""Interval of signs of life."""
QUIET_S = 300.0
"""A run without a sign of life for so long may be gone."""
_RECENT = 5
"""Steps over which rates are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What a run does now."""

    phase: str
    """`ended` after the run."""
    actor: str
    """Part of the run that works in this phase; all others wait for it."""
    step: int
    """Counted from 0."""
    num_steps: int
    done: int = 0
    total: int = 0
    """Groups of the phase; 0 where a phase has no count."""
    part: str = ""
    """Part of the phase, if it has parts; those of a publish are `check`, `send` and `prove`."""
    since_s: float = 0.0
    """Begin of the phase, wall clock."""
    written_s: float = 0.0
    """When the run itself has last written, wall clock."""
    alive_s: float = 0.0
    """When the run's process last existed, wall clock; 0 in a record of a version that did not write it."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @property
    def last_sign_s(self) -> float:
        """The last sign of life, wall clock."""
        return self.alive_s or self.written_s


@dataclass(slots=True, kw_only=True)
class StatusFile:
    """Writes the status of the run of this process."""

    run_dir: Path
    num_steps: int
    step: int = 0
    """Steps that are finished. A trainer that returns to a checkpoint lowers it."""
    newest_step: int = field(init=False)
    """Most steps that were ever finished; nothing lowers it."""
    on_finished: Callable[[], None] = lambda: None
    """Called when a step is over."""
    _now: Now | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Of `_now` and the file, which the thread of `until_the_end` writes, too."""

    def __post_init__(self) -> None:
        self.newest_step = self.step

    def phase(self, actor: str, phase: str) -> None:
        """A phase begins."""
        now_s = time.time()
        self._write(Now(phase=phase, actor=actor, step=self.step, num_steps=self.num_steps, since_s=now_s))

    def part(self, name: str) -> None:
        """A part of the present phase begins."""
        if self._now is not None:
            self._write(replace(self._now, part=name))

    def progress(self, done: int, total: int) -> None:
        """The present phase has come to `done` of `total`."""
        # the wall clock may be set back
        if self._now is not None and abs(time.time() - self._now.written_s) >= WRITE_EVERY_S:
            self._write(replace(self._now, done=done, total=total))

    def finished(self, step: int) -> None:
        """A step, counted from 0, is over."""
        self.step = step + 1
        self.newest_step = max(self.newest_step, self.step)
        self.on_finished()

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """The body is the run; a thread writes that it lives. Afterwards the status says that it has ended."""
        ends = threading.Event()
        thread = threading.Thread(target=self._live, args=(ends,), name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
            self.phase("", "ended")

    def _live(self, ends: threading.Event) -> None:
        while not ends.wait(ALIVE_EVERY_S):
            self.alive()

    def alive(self) -> None:
        """The process exists; how far the run has come, and since when, stays as it was."""
        with self._lock:
            if self._now is not None:
                self._now = replace(self._now, alive_s=time.time())
                self._replace_file(self._now)

    def _write(self, now: Now) -> None:
        now_s = time.time()
        with self._lock:
            self._now = replace(now, written_s=now_s, alive_s=now_s)
            self._replace_file(self._now)

    def _replace_file(self, now: Now) -> None:
        partial = self.run_dir / f"{STATUS}.partial"
        with suppress(OSError):  # a status that cannot be written must not end a run; a full disk is found elsewhere
            with open(partial, "w", encoding="utf-8", opener=opener) as file:
                file.write(json.dumps(asdict(now)) + "\n")
            partial.replace(self.run_dir / STATUS)


def read_now(run_dir: Path) -> Now | None:
    """The last status; None where there is none.

    Raises:
        RunDirectoryError: the file holds something else.
    """
    try:
        now = Now(**json.loads((run_dir / STATUS).read_text(encoding="utf-8")))
        _check_numbers(now)
        return now
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise RunDirectoryError(
            f"{run_dir / STATUS} holds no status ({error}); another version has written it"
        ) from error


def _check_numbers(now: Now) -> None:
    for name in ("step", "num_steps", "done", "total", "since_s", "written_s", "alive_s"):
        if not isinstance(getattr(now, name), int | float):
            raise TypeError(f"`{name}` is no number")


def status_lines(run_dir: Path, *, now_s: float) -> list[str]:
    """What the run does at `now_s` (wall clock), a line for each fact.

    Raises:
        RunDirectoryError: `run_dir` is no run directory.
    """
    if not (run_dir / "metrics.jsonl").exists() and not (run_dir / STATUS).exists():
        raise RunDirectoryError(f"`{run_dir}` holds no run: it has neither {STATUS} nor metrics.jsonl")
    now = read_now(run_dir)
    rows, num_damaged = readable_rows(metrics := run_dir / "metrics.jsonl")
    request = read_request(run_dir)
    return [
        *(_present(now, now_s) if now is not None else []),
        *_rates(rows, now.num_steps if now is not None else 0),
        f"checkpoint: {_newest_checkpoint(run_dir / 'checkpoints')}",
        *([f"stop requested {_seconds(now_s - request.time_s)} ago: {request.reason}"] if request else []),
        *left_out(metrics, num_damaged),
    ]


def _newest_checkpoint(folder: Path) -> str:
    try:
        newest = Checkpoints(folder).latest() if folder.is_dir() else None
    except RunDirectoryError as error:  # all other lines are of use to who mends it
        return str(error)
    return f"step {newest[0]}" if newest else "none"


def _present(now: Now, now_s: float) -> list[str]:
    if now.phase == "ended":
        return [f"ended {_seconds(now_s - now.written_s)} ago on {now.host}, {now.step} of {now.num_steps} steps"]
    where = f"{now.host}, process {now.pid}"
    silent_s = now_s - now.last_sign_s
    gone = "; the run may be gone" if silent_s > QUIET_S else ""
    part = f" ({now.part})" if now.part else ""
    count = f", {now.done} of {now.total} groups" if now.total else ""
    step = min(now.step + 1, now.num_steps)
    return [
        f"step {step} of {now.num_steps}: {now.phase}{part} for {_seconds(now_s - now.since_s)}{count} (all wait for "
        f"{now.actor})",
        f"running on {where}, alive {_seconds(silent_s)} ago, last record {_seconds(now_s - now.written_s)} ago{gone}",
    ]


def _rates(rows: Sequence[Mapping[str, object]], num_steps: int) -> list[str]:
    """Averages over the last steps, and the time that is left."""
    recent = rows[-_RECENT:]
    step_s = _mean(recent, "timing_s/step")
    if step_s is None:
        return []
    phases = [f"{phase} {mean:.1f}" for phase in PHASES if (mean := _mean(recent, f"timing_s/{phase}")) is not None]
    found = [f"last {len(recent)} step(s): {step_s:.1f} s each ({', '.join(phases)})"]
    tokens, reward, left = _mean(recent, "perf/response_tokens"), _mean(recent, "reward/mean"), num_steps - len(rows)
    rates = [f"tokens/s {tokens / step_s:.4g}"] if tokens is not None and step_s > 0 else []
    rates += [f"reward {reward:.4g}"] if reward is not None else []
    if left > 0:
        between_s = _between_s(rows)
        between = f" with {_seconds(between_s)} between steps" if between_s >= 1 else ""
        rates.append(f"{left} steps to go, about {_seconds(left * (step_s + between_s))}{between}")
    return [*found, *([", ".join(rates)] if rates else [])]


def _between_s(rows: Sequence[Mapping[str, object]]) -> float:
    """Mean seconds between a step and the next: evaluations and checkpoints. They are rare, so all rows count."""
    elapsed_s, step_s = _mean(rows, "timeline/elapsed_s"), _mean(rows, "timing_s/step")
    if elapsed_s is None or step_s is None:
        return 0.0
    stops = [value for row in rows if isinstance(value := row.get("timing_s/suspended"), int | float)]
    return max(elapsed_s - step_s - sum(stops) / len(rows), 0.0)


def _mean(rows: Sequence[Mapping[str, object]], key: str) -> float | None:
    values = [value for row in rows if isinstance(value := row.get(key), int | float)]
    return sum(values) / len(values) if values else None


def _seconds(seconds: float) -> str:
    """In the unit that a person would choose; a damaged file may hold any number."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
