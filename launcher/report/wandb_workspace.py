"""The dashboard as a saved view of a wandb workspace, by the package wandb-workspaces.

The package is optional and its interface is a public preview: https://docs.wandb.ai/ref/wandb_workspaces/workspaces.
Saving opens a connection to the wandb server that the user is signed in to.
"""

import importlib
from types import ModuleType

from launcher.errors import ConfigError
from launcher.metrics.panels import DASHBOARD

VIEW = "megatron-rl"
PACKAGE = "wandb-workspaces"


def save_workspace(destination: str) -> str:
    """Save the panels as a view of the project `ENTITY/PROJECT`; returns the address of the view.

    Raises:
        ConfigError: `destination` has another form, or wandb-workspaces is not installed.
    """
    entity, slash, project = destination.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ConfigError(f"--wandb = {destination}: name the project as ENTITY/PROJECT")
    workspaces, reports = _load("wandb_workspaces.workspaces"), _load("wandb_workspaces.reports.v2")
    sections = [
        workspaces.Section(
            name=title,
            panels=[
                reports.LinePlot(title=panel.title, x="Step", y=list(panel.metrics), log_y=panel.log)
                for panel in panels
            ],
            is_open=title == "Learning",
        )
        for title, panels in DASHBOARD.items()
    ]
    workspace = workspaces.Workspace(name=VIEW, entity=entity, project=project, sections=sections)
    workspace.save()
    return str(workspace.url)


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--wandb needs the package {PACKAGE}, which is not installed: pip install {PACKAGE}; "
            "`megatron-rl dashboard RUN_DIR` writes the same panels as a page without it"
        ) from error
