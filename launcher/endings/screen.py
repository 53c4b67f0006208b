"""The one screen that a command shows when it ends other than well: what, where, what is kept, what to do, the log.

The full traceback, remote tracebacks included, goes to the log. The terminal shows a traceback for defects of ours
alone: that of the first error of the chain, once.
"""

import socket
import textwrap
import traceback
from pathlib import Path

from launcher.endings.kept import Kept
from launcher.endings.kinds import Ending, Verdict, root
from rollout.failures import plain

WIDTH = 100
_LABEL = 9
_MAX_WHAT = 8
"""Lines of the error's own words."""


def screen(verdict: Verdict, *, command: str, kept: Kept, log: str, process_log: str = "") -> str:
    """The screen; `log` says where the traceback is, `process_log` where the failed process has written."""
    ending = verdict.ending
    advice = " ".join(part for part in (ending.advice, _again(command, kept)) if part)
    return "\n".join(
        [
            f"megatron-rl {command}: {ending.title} (exit code {ending.code})",
            *_field("what", verdict.what, limit=_MAX_WHAT),
            *_field("where", str(verdict.place) or f"{command}'s own process, node {socket.gethostname()}"),
            *_field("kept", str(kept)),
            *_field("do", advice),
            *_field("log", f"{log} (full traceback)"),
            *(_field("", process_log) if process_log else []),
        ]
    )


def one_line(verdict: Verdict, *, command: str, kept: Kept) -> str:
    """What is said of a command that was interrupted or terminated."""
    return f"megatron-rl {command}: {verdict.ending.title}; kept: {kept}. {_again(command, kept)}"


def first_traceback(error: BaseException) -> str:
    """The traceback of the first error that led to `error`, without those that followed from it."""
    first = root(error)
    if isinstance(getattr(first, "cause", None), BaseException):
        return f"Traceback (most recent call last) in {plain(str(first)).strip()}"  # Ray's text is the remote traceback
    return "".join(traceback.format_exception(first, chain=False)).strip()


def log_of(place_log_dir: Path | None, verdict: Verdict) -> str:
    """The log of the process in which it happened, if there is one."""
    place = verdict.place
    if place_log_dir is None or not place.role or not place.ranks:
        return ""
    path = place_log_dir / f"{place.role}-{place.ranks[0]}.log"
    return str(path) if path.exists() else ""


def _again(command: str, kept: Kept) -> str:
    if kept.step:
        return f"The same command resumes after step {kept.step}."
    return "The same command begins anew." if command != "export" else "The run directory is as it was."


def _field(label: str, text: str, *, limit: int = 6) -> list[str]:
    """A label and its text in lines of at most `WIDTH`; a single longer word, a path, stays whole."""
    lines = textwrap.wrap(
        " ".join(text.split()),
        width=WIDTH - _LABEL,
        max_lines=limit,
        placeholder=" ...",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"  {label if number == 0 else '':<{_LABEL - 2}}{line}" for number, line in enumerate(lines)]


def exit_codes() -> str:
    """The table of exit codes, for `--help`."""
    rows = [f"  {ending.code:>3}  {ending.title}" for ending in Ending]
    return "\n".join(["exit codes:", "    0  done", *rows])
