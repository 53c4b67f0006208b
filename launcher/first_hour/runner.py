"""Runs stages within the given minutes, each in a process of its own, and goes on where an earlier call ended.

A stage that has passed with the same code, packages and driver on the same kind of device is not run again. A stage
that takes longer than its limit, or than the minutes that are left, is ended with all processes that it has started.
So are the stages that run when the call itself is ended by an error or a signal; they leave no result. One line is
printed as soon as a stage has ended, and its file is complete before the next one begins.
"""

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from launcher.first_hour.families import Families
from launcher.first_hour.results import Outcome, Result, read, read_junit, write, write_all
from launcher.first_hour.shares import write_shares
from launcher.first_hour.stages import Stage

HASHED = ("history", "rollout", "megatron_rl", "launcher", "benchmarks", "tests", "examples")
"""Folders whose Python files are the code of a result."""
MIN_S = 20.0
"""A stage is not begun with less time than this."""
LOG_LINES = 3
"""Lines of the log that are shown if a stage fails without a failed test."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstHour:
    """Stages, and where they run."""

    stages: Sequence[Stage]
    folder: Path
    """Of results, logs and records."""
    root: Path
    """A checkout of the project."""
    num_beside: int = 1
    """Most stages at the same time, where `Stage.beside` allows it."""
    say: Callable[[str], None] = print

    def run(self, *, minutes: float, only: Collection[str] | None = None) -> list[Result]:
        """Run the stages that have not passed yet; or, passed or not, those named in `only` and no others.

        Returns the results of the stages that this call has run or found passed, in the order of the stages. The first
        stage describes the device. It is always run, and if it fails nothing else is. On an exception, also that of a
        signal, all stages are ended before it is raised.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [stage.name for stage in self.stages]
        results: list[Result] = []
        one_at_a_time = threading.Lock()

        def finish(result: Result) -> None:
            with one_at_a_time:
                write(self.folder, result)
                self.say(result.line())
                results.append(result)
                write_shares(self.folder, write_all(self.folder, names))

        here = Call(ends_at_s=time.monotonic() + 60 * minutes, code=digest(self.root))

        def run_now(stage: Stage) -> Result:
            return run_stage(stage, self.folder, root=self.root, call=here)

        (first,) = _each(run_now, self.stages[:1], num_beside=1, families=here.families)
        here = replace(here, device=_device_name(first), versions=_versions(first))
        finish(replace(first, device=here.device, versions=here.versions))
        if first.outcome != "passed":
            return results

        def take(stage: Stage) -> None:
            earlier = read(self.folder / f"{stage.name}.json") if only is None else None
            if earlier is not None and here.has_passed(earlier):
                self.say(f"{stage.name}: passed before, at {earlier.began_at}")
                results.append(earlier)
            elif here.ends_at_s - time.monotonic() < MIN_S:
                self.say(
                    f"{stage.name}: not begun, the {minutes:g} minutes are over; the same command goes on from here"
                )
            else:
                finish(run_now(stage))

        chosen = [stage for stage in self.stages[1:] if only is None or stage.name in only]
        for beside, row in itertools.groupby(chosen, key=lambda stage: stage.beside):
            _each(take, row, num_beside=self.num_beside if beside else 1, families=here.families)
        return sorted(results, key=lambda result: names.index(result.stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the stages of one call share."""

    ends_at_s: float
    """Of `time.monotonic`."""
    code: str
    """Digest of the project's files."""
    device: str = ""
    """Name of the device; empty before the first stage has ended."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of packages and of the driver, by name; empty before the first stage has ended."""
    families: Families = field(default_factory=Families)

    def has_passed(self, earlier: Result) -> bool:
        """Whether an earlier result passed with this code, these packages and this driver on this kind of device."""
        before = (earlier.outcome, earlier.code, earlier.device, earlier.versions)
        return before == ("passed", self.code, self.device, self.versions)


def _each(action: Callable[[Stage], T], stages: Iterable[Stage], *, num_beside: int, families: Families) -> list[T]:
    """What an action returns for each stage, at most `num_beside` at a time; on an exception the families are ended.

    Other threads start the stages, so a signal, which Python handles in the main thread, meets no half-started stage.
    """
    with ThreadPoolExecutor(num_beside) as pool:
        try:
            return list(pool.map(action, stages))
        except BaseException:
            families.end()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_stage(stage: Stage, folder: Path, *, root: Path, call: Call) -> Result:
    """Run one stage and read what it has written.

    Raises:
        CallEndedError: the call was ended before the stage had ended.
    """
    for path in (stage.junit_path(folder), stage.record_path(folder)):
        path.unlink(missing_ok=True)
    began, began_at = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S%z")
    limit_s = min(stage.limit_s, call.ends_at_s - began)
    log = folder / f"{stage.name}.log"
    exit_code = call.families.run(stage.command(folder.resolve()), root=root, log=log, limit_s=limit_s)
    tests = read_junit(stage.junit_path(folder)) if stage.tests else None
    record = None
    with suppress(OSError, ValueError):
        record = json.loads(stage.record_path(folder).read_text(encoding="utf-8"))
    outcome: Outcome = "passed"
    fault = ""
    if exit_code is None:
        outcome, fault = "out of time", f"ended after {limit_s:.0f} s"
    elif exit_code:
        outcome, fault = "failed", f"exit code {exit_code}; {_last_lines(log)}"
    elif tests is not None and not tests.passed:
        outcome, fault = "failed", "no test has run"
    return Result(
        stage=stage.name,
        decides=stage.decides,
        outcome=outcome,
        fault=fault,
        seconds=round(time.monotonic() - began, 1),
        began_at=began_at,
        device=call.device,
        code=call.code,
        versions=call.versions,
        tests=tests,
        record=record,
    )


def digest(root: Path) -> str:
    """Digest of all Python files of the project."""
    found = hashlib.sha256()
    for path in sorted(path for folder in HASHED for path in (root / folder).rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def _device_name(result: Result) -> str:
    """The name in the first stage's record; empty if it failed."""
    return str(_part(result, "facts").get("name", ""))


def _versions(result: Result) -> dict[str, str]:
    """Those in the first stage's record; empty if it failed."""
    return {name: str(version) for name, version in _part(result, "versions").items()}


def _part(result: Result, name: str) -> Mapping[str, object]:
    part = result.record.get(name) if isinstance(result.record, dict) else None
    return part if isinstance(part, dict) else {}


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-LOG_LINES:])
