"""The dashboard as a saved view of a wandb workspace, by the package wandb-workspaces.

The package's interface is a public preview: https://docs.wandb.ai/ref/wandb_workspaces/workspaces. Saving opens a
connection to the wandb server that the user is signed in to.
"""

from launcher.errors import ConfigError
from launcher.metrics.panels import DASHBOARD

VIEW = "megatron-rl"


def save_workspace(destination: str) -> str:
    """Save the panels as a view of the project `ENTITY/PROJECT`; returns the address of the view.

    Each call makes a new view.

    Raises:
        ConfigError: `destination` has another form, the user is not signed in, or the server refuses.
    """
    entity, slash, project = destination.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ConfigError(f"--wandb = {destination}: name the project as ENTITY/PROJECT")
    # both import wandb, which takes a second and which the page does not need
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    sections = [
        workspaces.Section(
            name=title,
            panels=[
                reports.LinePlot(
                    title=panel.title,
                    x="Step",
                    y=list(panel.metrics),
                    log_y=panel.log,
                    plot_type="stacked-area" if panel.stacked else "line",
                )
                for panel in panels
            ],
            is_open=title == "Learning",
        )
        for title, panels in DASHBOARD.items()
    ]
    workspace = workspaces.Workspace(name=VIEW, entity=entity, project=project, sections=sections)
    try:
        workspace.save()
        return str(workspace.url)
    except Exception as error:  # of wandb's process and of its server; their classes are not public
        raise ConfigError(
            f"--wandb = {destination}: the workspace was not saved: {str(error).strip()}; sign in with `wandb login`, "
            "name a project that you may write to, and set WANDB_BASE_URL for a server of your own"
        ) from error
