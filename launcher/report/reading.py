"""Reads records for people: what is damaged is left out, and `notes` says so, because the rest of a page is of use."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from launcher.run_dir.atomic_files import left_out, readable_rows
from launcher.run_dir.places import Places, read_places
from rollout.evaluation import EvaluationRow


@dataclass(slots=True)
class RecordReader:
    """Reads the records of a run directory."""

    run_dir: Path
    notes: list[str] = field(default_factory=list)
    """Sentences about what was left out."""

    def rows(self, path: Path) -> list[dict[str, object]]:
        """Rows of a JSON-lines file; none without it."""
        found, num_damaged = readable_rows(path)
        self.notes += left_out(path, num_damaged)
        return found

    def evaluation(self) -> list[EvaluationRow]:
        """Rows of `evaluation.jsonl`."""
        path = self.run_dir / "evaluation.jsonl"
        found, num_damaged = readable_rows(path)
        rows = []
        for row in found:
            try:
                rows.append(EvaluationRow.from_row(row))
            except TypeError:
                num_damaged += 1
        self.notes += left_out(path, num_damaged)
        return rows

    def environment(self) -> dict[str, object]:
        """Content of `environment.json`; empty without it."""
        path = self.run_dir / "environment.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        self._damaged(path)
        return {}

    def config(self) -> tuple[str, dict[str, object]]:
        """Text of `config.yaml`, and the keys in it; empty without it."""
        path = self.run_dir / "config.yaml"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        try:
            found = yaml.safe_load(text) or {}
        except (ValueError, yaml.YAMLError):
            found = None
        if isinstance(found, dict):
            return text, found
        self._damaged(path)
        return text, {}

    def places(self) -> Places | None:
        """Nodes of engines and trainer ranks; None if they were not recorded."""
        try:
            return read_places(self.run_dir)
        except (ValueError, LookupError, TypeError):
            self._damaged(self.run_dir / "places.json")
            return None

    def _damaged(self, path: Path) -> None:
        self.notes.append(f"{path.name} is damaged and left out")
