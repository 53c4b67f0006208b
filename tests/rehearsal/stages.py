"""Stages of a case: each prints its name, its outcome and its seconds as one line of JSON."""

import json
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
MARK = "stage: "
"""Begin of a line of a stage; libraries print other lines."""


def stage(name: str, action: Callable[[], Result]) -> Result | None:
    """Run one stage; None if it fails."""
    began, fault, result = time.perf_counter(), "", None
    try:
        result = action()
    except BaseException as error:  # the case goes on
        fault = f"{type(error).__name__}: {str(error)[:600]}"
        traceback.print_exc()
    row = {"stage": name, "fault": fault, "seconds": round(time.perf_counter() - began, 2)}
    print(f"\n{MARK}{json.dumps(row)}", flush=True)
    return result


def rows_of(output: str) -> list[dict[str, str]]:
    """The stages that a case has printed."""
    lines = (line for line in output.splitlines() if line.startswith(MARK))
    return [json.loads(line.removeprefix(MARK)) for line in lines]
