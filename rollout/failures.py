"""Errors with a kind and a place: the process and node in which the failure happened.

    PlacedError (RuntimeError)
     +- CallError            a process raised an error in a call; the error is the cause
     +- ProcessLostError     a process ended
     +- EnginesLostError     engines ended more often than the run allows, or none is left
     |   +- StepLostError    the engine of a deterministic run ended; the step must be taken again
     +- DeadlineError        an answer did not come in time
     +- RewardBrokenError    the reward function fails for every response
     +- UnusableDeviceError  the packages of a process cannot use the device on which it is placed
     +- PublishRefusedError  engines refused a publish (`megatron_rl.controller.publish_refusal`)

The launcher maps each kind to an exit code (`launcher.endings.kinds`). All kinds can be pickled, so they pass through
Ray unchanged. Pure: imports no ray; errors that Ray has wrapped are read by their attributes and text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_BRIEF = 600
"""Most characters of a foreign error's message on one line."""

_PID = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_IP = re.compile(r"^\s*ip: (\S+)", re.MULTILINE)
_EXIT = re.compile(r"Worker exit detail: (.+?)(?: There are some potential| Some common causes|$)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The process or processes in which a failure happened."""

    role: str = ""
    """`engine`, `trainer`, `scorer`, `text actor` or `reader of rows`; empty where unknown."""
    ranks: tuple[int, ...] = ()
    """Number of the engine, or rank of the trainer."""
    node: str = ""
    """Name or address of the machine, of the first one if there are several; empty where unknown."""

    def __str__(self) -> str:
        ranks = ranges(self.ranks)
        numbered = f"{self.role} {ranks}".strip() if self.role != "trainer" else f"trainer rank {ranks}".rstrip()
        return f"{numbered}, node {self.node}" if self.node else numbered


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order for people; three or more in a row as a range: `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


NOWHERE = Place()


class PlacedError(RuntimeError):
    """Base of the failures above: a message and a place."""

    def __init__(self, message: str, place: Place = NOWHERE) -> None:
        super().__init__(message, place)
        self.place = place

    def __str__(self) -> str:
        return str(self.args[0])


class CallError(PlacedError):
    """A process raised an error in a call; `__cause__` is the error."""


class ProcessLostError(PlacedError):
    """A process ended."""


class EnginesLostError(PlacedError):
    """Engines ended more often than the run allows, or none is left."""


class StepLostError(EnginesLostError):
    """The engine of a deterministic run ended while it sampled.

    The groups cannot be continued: which responses are computed together must not depend on a death.
    """


class TokensLostError(PlacedError):
    """Sampled tokens were in the memory of a node that is lost."""


class DeadlineError(PlacedError):
    """An answer did not come in time; the message names the waiting process, the late one and the seconds."""


class RewardBrokenError(PlacedError):
    """The reward function fails for every response, or its module cannot be imported."""


class UnusableDeviceError(PlacedError):
    """The packages of a process cannot use the device on which it is placed; the message names the fix."""


def brief(error: BaseException) -> str:
    """One line about an error: the remote error without Ray's wrapping and traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return brief(cause)
    text = plain(str(error)).strip()
    if "The actor died" in text or "The actor is dead" in text:
        return _death(text)
    if isinstance(error, PlacedError):
        return text
    line = " ".join(text.split())
    shown = line if len(line) <= MAX_BRIEF else f"{line[:MAX_BRIEF]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def plain(text: str) -> str:
    """A text of Ray's without terminal colours."""
    return _COLOUR.sub("", text)


def node_of(error: BaseException) -> str:
    """Address of the node on which the error happened, by Ray's report; empty where the report lacks it."""
    address = getattr(error, "ip", "")
    if isinstance(address, str) and address:
        return address
    match = _IP.search(str(error))
    return match[1] if match else ""


def _death(text: str) -> str:
    """One line of Ray's report of a dead actor."""
    if "creation task" in text:
        return f"its process could not start: {text.splitlines()[-1].strip()}"
    pid, detail = _PID.search(text), _EXIT.search(text)
    reason = " ".join(detail[1].split()) if detail else " ".join(text.splitlines()[-1].split())
    return f"process {pid[1] if pid else 'unknown'} ended: {reason[:MAX_BRIEF]}"
