"""What the command line says instead of a traceback.

    LaunchError (ValueError)       anything a user can mend; the message is one screen: value, bound, fix
     +- ConfigError                the configuration file, an override, or a combination of both
     +- RunDirectoryError          the run directory is in use, or belongs to another run
    Terminated (BaseException)     SIGTERM came

`cli.main` prints the message of a `LaunchError` and exits with code 2. How every other exception ends a command, and
with which exit code, is in `launcher.endings.kinds`; what the terminal shows of it, in `launcher.endings.screen`.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class LaunchError(ValueError):
    """Something the user can mend; the message names the value, the bound and the fix."""


class ConfigError(LaunchError):
    """The configuration cannot be run; the message lists every problem found, a paragraph each."""


class RunDirectoryError(LaunchError):
    """The run directory is held by a living process, or belongs to another run."""


class Terminated(BaseException):
    """The process was asked to end (SIGTERM); like KeyboardInterrupt it is no `Exception`."""


@contextmanager
def judging_user_input() -> Iterator[None]:
    """A `ValueError` raised in the body becomes a `LaunchError`; for code that reads what the user gave.

    One that a remote process raised arrives wrapped with that process's traceback; its cause alone is shown.
    """
    try:
        yield
    except LaunchError:
        raise
    except ValueError as error:
        raise LaunchError(str(getattr(error, "cause", error))) from error
