"""The screen of a failed command: the error, its place, the saved work, the advice and the path of the log.

The full traceback, remote tracebacks included, goes to the log. The terminal shows a traceback only for defects of
megatron-rl: that of the first error of the chain, once.
"""

import socket
import textwrap
import traceback
from pathlib import Path

from launcher.endings.kinds import Ending, Verdict, root
from launcher.endings.saved_work import SavedWork
from rollout.failures import plain

WIDTH = 100
_LABEL = 9
_MAX_WHAT = 8
"""Lines of the error's message."""


def screen(verdict: Verdict, *, command: str, saved: SavedWork, log: str, process_log: str = "") -> str:
    """The screen; `log` is the path of the full traceback, `process_log` that of the failed process's log."""
    ending = verdict.ending
    advice = " ".join(part for part in (verdict.advice, _again(command, saved)) if part)
    return "\n".join(
        [
            f"megatron-rl {command}: {ending.title} (exit code {ending.code})",
            *_field("what", verdict.message, limit=_MAX_WHAT),
            *_field("where", str(verdict.place) or f"{command}'s own process, node {socket.gethostname()}"),
            *_field("kept", str(saved)),
            *_field("do", advice),
            *_field("log", f"{log} (full traceback)"),
            *(_field("", process_log) if process_log else []),
        ]
    )


def one_line(verdict: Verdict, *, command: str, saved: SavedWork) -> str:
    """The line for a command that was interrupted or terminated."""
    return f"megatron-rl {command}: {verdict.ending.title}; kept: {saved}. {_again(command, saved)}"


def first_traceback(error: BaseException) -> str:
    """The traceback of the first error in the chain of `error`, without the errors that followed."""
    first = root(error)
    if isinstance(getattr(first, "cause", None), BaseException):
        return f"Traceback (most recent call last) in {plain(str(first)).strip()}"  # Ray's text is the remote traceback
    return "".join(traceback.format_exception(first, chain=False)).strip()


def process_log_path(log_dir: Path | None, verdict: Verdict) -> str:
    """Path of the failed process's log in `log_dir`; empty if there is none."""
    place = verdict.place
    if log_dir is None or not place.role or not place.ranks:
        return ""
    name = f"{place.role}-{place.ranks[0]}.log"
    found = [path for path in (log_dir / name, *sorted(log_dir.glob(f"*/{name}"))) if path.exists()]
    return str(found[0]) if found else ""


def _again(command: str, saved: SavedWork) -> str:
    """The effect of starting the same command again."""
    if saved.step:
        return f"The same command resumes after step {saved.step}."
    return "The same command begins anew." if command != "export" else "The run directory is unchanged."


def _field(label: str, text: str, *, limit: int = 6) -> list[str]:
    """A label and its text in lines of at most `WIDTH` characters; a longer word (a path) is not broken."""
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
