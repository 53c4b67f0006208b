"""Result files of stages. Pure; writes are atomic, so an interrupted stage leaves no half file.

`FOLDER/NAME.json` holds one `Result`. `FOLDER/first_hour.json` holds all of them in the order of the stages, and is the
file to keep.
"""

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from launcher.run_dir.atomic_files import replace_text

Outcome = Literal["passed", "failed", "out of time"]
ALL = "first_hour.json"
MAX_FAULT = 600
"""Most characters of a failed test's message in a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What pytest reports."""

    passed: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    """Begin of the message, by test."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Reason, by test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome of one stage."""

    stage: str
    decides: str
    outcome: Outcome
    fault: str = ""
    """Why the stage has not passed."""
    seconds: float
    began_at: str
    """Date and time with the offset from UTC."""
    device: str
    """Name of the device; empty where none was found."""
    code: str
    """Digest of the project's files."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of packages and of the driver, by name; empty where the first stage did not tell them."""
    tests: Counts | None = None
    record: object = None
    """Content of the record that the command has written."""

    def line(self) -> str:
        """The result on one line, for people."""
        counts = "" if self.tests is None else f", {self.tests.passed} tests passed"
        if self.tests is not None and self.tests.failed:
            counts += f", {len(self.tests.failed)} failed"
        if self.tests is not None and self.tests.skipped:
            counts += f", {len(self.tests.skipped)} skipped"
        return (
            f"{self.stage}: {self.outcome} after {self.seconds:.0f} s{counts}{f': {self.fault}' if self.fault else ''}"
        )


def write(folder: Path, result: Result) -> None:
    """Write the file of one stage."""
    replace_text(folder / f"{result.stage}.json", json.dumps(asdict(result), indent=1) + "\n")


def write_all(folder: Path, stages: Sequence[str]) -> list[Result]:
    """Write the newest result of each of these stages in one file, also those of earlier calls; returns them."""
    found = [result for stage in stages if (result := read(folder / f"{stage}.json")) is not None]
    replace_text(folder / ALL, json.dumps([asdict(result) for result in found], indent=1) + "\n")
    return found


def read(path: Path) -> Result | None:
    """The result in a file; None if there is none, or it is of another version of the program."""
    try:
        return _result(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_all(path: Path) -> list[Result]:
    """What `write_all` has written; empty if there is no such file.

    Raises:
        TypeError: the file is of another version of the program.
    """
    return [_result(each) for each in json.loads(path.read_text(encoding="utf-8"))] if path.is_file() else []


def _result(content: dict[str, Any]) -> Result:
    tests = content.pop("tests")
    return Result(**content, tests=None if tests is None else Counts(**tests))


def read_junit(path: Path) -> Counts:
    """What pytest has written with `--junitxml`; empty if it ended before it wrote."""
    try:
        cases = list(ET.parse(path).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return Counts()
    passed, failed, skipped = 0, {}, {}
    for case in cases:
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name', '')}"
        fault = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        if fault is not None:
            failed[name] = fault.get("message", "")[:MAX_FAULT]
        elif (reason := case.find("skipped")) is not None:
            skipped[name] = reason.get("message", "")[:MAX_FAULT]
        else:
            passed += 1
    return Counts(passed=passed, failed=failed, skipped=skipped)
