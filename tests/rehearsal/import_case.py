"""Every module of the product is imported: each name that it takes from vLLM, Megatron, Transformer Engine exists."""

import importlib
import pkgutil
from pathlib import Path

import history
import launcher
import megatron_rl
import rollout
from tests.rehearsal.stages import stage

PACKAGES = (history, rollout, megatron_rl, launcher)
ON_IMPORT_ONLY = ("__main__",)
"""Modules that run a command when they are imported."""


def main() -> None:
    for package in PACKAGES:
        root = str(Path(str(package.__file__)).parent)
        names = [info.name for info in pkgutil.walk_packages([root], f"{package.__name__}.")]
        chosen = [name for name in names if not name.endswith(ON_IMPORT_ONLY)]
        stage(f"{package.__name__}: {len(chosen)} modules", lambda chosen=chosen: import_all(chosen))


def import_all(names: list[str]) -> None:
    faults = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # all are tried
            faults.append(f"{name}: {type(error).__name__}: {error}")
    if faults:
        raise ImportError("; ".join(faults))


if __name__ == "__main__":
    main()
