"""Every module of the product is imported, and each name that it takes from the libraries exists, also in functions."""

import importlib
import pkgutil
from collections.abc import Collection
from pathlib import Path

import history
import launcher
import megatron_rl
import rollout
from tests.rehearsal.library_names import is_missing, names_taken
from tests.rehearsal.stages import stage

PACKAGES = (history, rollout, megatron_rl, launcher)
ON_IMPORT_ONLY = ("__main__",)
"""Modules that run a command when they are imported."""

FOR_CPUS = "cpu"
"""Folders of modules that take names from the CPU builds of the libraries within functions."""


def main() -> None:
    for package in PACKAGES:
        root = str(Path(str(package.__file__)).parent)
        names = [info.name for info in pkgutil.walk_packages([root], f"{package.__name__}.")]
        chosen = [name for name in names if not name.endswith(ON_IMPORT_ONLY)]
        stage(f"{package.__name__}: {len(chosen)} modules", lambda chosen=chosen: import_all(chosen))
    files = [file for package in PACKAGES for file in Path(str(package.__file__)).parent.rglob("*.py")]
    taken = {name for file in files if FOR_CPUS not in file.parts for name in names_taken(file)}
    stage(f"{len(taken)} names of libraries", lambda: resolve_all(taken))


def import_all(names: list[str]) -> None:
    faults = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # all are tried
            faults.append(f"{name}: {type(error).__name__}: {error}")
    if faults:
        raise ImportError("; ".join(faults))


def resolve_all(names: Collection[str]) -> None:
    assert is_missing("torch:cuda.no_such_name") and is_missing("torch.no_such_module:")
    missing = sorted(name for name in names if is_missing(name))
    if missing:
        raise ImportError(", ".join(missing))


if __name__ == "__main__":
    main()
