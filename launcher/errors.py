"""Errors of user input, and termination by a signal.

    LaunchError (ValueError)       an error that the user can fix; the message is one screen: value, bound, fix
     +- ConfigError                the configuration file, an override, or a combination of both
     +- RunDirectoryError          the run directory is in use (RunInUseError), or belongs to another run
    Terminated (BaseException)     the process received SIGTERM

`cli.main` prints the message of a `LaunchError` and exits with code 2. `launcher.endings.kinds` maps every other
exception to an exit code; `launcher.endings.screen` formats it for the terminal.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class LaunchError(ValueError):
    """An error that the user can fix; the message names the value, the bound and the fix."""


class ConfigError(LaunchError):
    """The configuration cannot be run; the message lists every problem, one paragraph each."""


class RunDirectoryError(LaunchError):
    """The run directory is held by a living process, or belongs to another run."""


class RunInUseError(RunDirectoryError):
    """A living process holds the run directory."""


class Terminated(BaseException):
    """The process received SIGTERM; like KeyboardInterrupt it is no `Exception`."""


@contextmanager
def judging_user_input() -> Iterator[None]:
    """Turns a `ValueError` of the body into a `LaunchError`; for code that reads user input.

    Ray wraps the error of a remote process with that process's traceback; only its cause is shown.
    """
    try:
        yield
    except LaunchError:
        raise
    except ValueError as error:
        raise LaunchError(str(getattr(error, "cause", error))) from error
