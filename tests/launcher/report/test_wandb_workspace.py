"""The call that saves a workspace, against hand-written twins of the documented classes of wandb-workspaces."""

import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from launcher.metrics.panels import DASHBOARD
from launcher.report.wandb_workspace import save_workspace


@dataclass(kw_only=True)
class LinePlot:
    title: str
    x: str
    y: list[str]
    log_y: bool


@dataclass(kw_only=True)
class Section:
    name: str
    panels: list[LinePlot]
    is_open: bool


@dataclass(kw_only=True)
class Workspace:
    name: str
    entity: str
    project: str
    sections: list[Section]
    is_saved: bool = field(default=False, init=False)

    def save(self) -> None:
        self.is_saved = True
        SAVED.append(self)

    @property
    def url(self) -> str:
        assert self.is_saved
        return f"{self.entity}/{self.project}/{self.name}"


SAVED: list[Workspace] = []


def test_the_workspace_has_the_sections_and_panels_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    package, workspaces, reports = (
        ModuleType(name) for name in ("wandb_workspaces", "wandb_workspaces.workspaces", "wandb_workspaces.reports.v2")
    )
    vars(workspaces).update(Workspace=Workspace, Section=Section)
    vars(reports).update(LinePlot=LinePlot)
    for module in (package, workspaces, reports):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    SAVED.clear()
    assert save_workspace("team/project") == "team/project/megatron-rl"
    (saved,) = SAVED
    assert [section.name for section in saved.sections] == list(DASHBOARD)
    drawn = [(plot.title, plot.y, plot.x) for section in saved.sections for plot in section.panels]
    assert drawn == [(panel.title, list(panel.metrics), "Step") for panels in DASHBOARD.values() for panel in panels]
