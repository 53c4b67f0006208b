"""The environment of a `make` that a test starts, which may itself run under `make test`."""

import os


def without_outer_make() -> dict[str, str]:
    """This process's environment without the variables by which an outer `make` changes what an inner one does."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
