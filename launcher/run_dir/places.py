"""`places.json` of a run directory: the node of each engine and of each trainer rank, as the last start placed them."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.run_dir.atomic_files import replace_text

FILE = "places.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Names of nodes; an empty name is the only node of a run."""

    engines: tuple[str, ...]
    """Node of each engine, by number."""
    trainers: tuple[str, ...]
    """Node of each trainer rank, by rank."""

    def by_node(self) -> Iterator[tuple[str, list[int], list[int]]]:
        """Name of each node, its trainer ranks and its engines; nodes in the order of their first process."""
        for node in dict.fromkeys([*self.trainers, *self.engines]):
            yield (
                node,
                [rank for rank, at in enumerate(self.trainers) if at == node],
                [number for number, at in enumerate(self.engines) if at == node],
            )


def write_places(run_dir: Path, places: Places) -> None:
    """Replace the file."""
    replace_text(run_dir / FILE, json.dumps(asdict(places)) + "\n")


def read_places(run_dir: Path) -> Places | None:
    """The places of a run; None for a run of a version that did not record them."""
    path = run_dir / FILE
    if not path.exists():
        return None
    row = json.loads(path.read_text(encoding="utf-8"))
    return Places(engines=tuple(row["engines"]), trainers=tuple(row["trainers"]))
