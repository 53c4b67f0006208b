"""What the command line says instead of a traceback.

    LaunchError (ValueError)       anything a user can mend; the message is one screen: value, bound, fix
     +- ConfigError                the configuration file, an override, or a combination of both
     +- RunDirectoryError          the run directory is in use, or belongs to another run

`cli.main` prints the message of a `LaunchError` and exits with code 2. Every other exception is a
fault of ours, or of the machine, and keeps its traceback.
"""


class LaunchError(ValueError):
    """Something the user can mend; the message names the value, the bound and the fix."""


class ConfigError(LaunchError):
    """The configuration cannot be run; the message lists every problem found, a paragraph each."""


class RunDirectoryError(LaunchError):
    """The run directory is held by a living process, or belongs to another run."""
