"""`megatron-rl dashboard --wandb` with the real client packages, against a stand-in for the server.

The command runs in a process of its own, because wandb's client starts a service that outlives a test.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.metrics.panels import DASHBOARD, Panel
from launcher.report.wandb_workspace import VIEW, save_workspace
from tests.support.deadline import DEADLINE_S
from tests.support.wandb_server import KEY, WandbServer, wandb_server


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as found:
        yield found


def dashboard(server: WandbServer, home: Path, *, key: str = KEY) -> subprocess.CompletedProcess[str]:
    """The command for a user with no other sign-in than `key`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_BASE_URL": server.url, "HOME": str(home)} | ({"WANDB_API_KEY": key} if key else {})
    return subprocess.run(
        [sys.executable, "-m", "launcher", "dashboard", "--wandb", "team/project"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def wanted(panel: Panel) -> dict:
    """The panel in wandb's format of line plots; an ordinary line is the server's default."""
    config = {
        "chartTitle": panel.title,
        "xAxis": "_step",
        "metrics": list(panel.metrics),
        "yLogScale": panel.log,
        "plotType": "stacked-area" if panel.stacked else "line",
    }
    return {"viewType": "Run History Line Plot", "config": config}


@pytest.mark.slow
def test_the_server_receives_the_sections_and_panels_of_the_page(server: WandbServer, tmp_path: Path) -> None:
    done = dashboard(server, tmp_path)
    assert done.returncode == 0, done.stderr
    (view,) = server.views()
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "project", VIEW)
    assert view["type"] == "project-view"
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(DASHBOARD)
    assert [section["name"] for section in sections if section["isOpen"]] == ["Learning"]
    for section in sections:
        sent = [{name: panel[name] for name in ("viewType", "config")} for panel in section["panels"]]
        assert sent == [wanted(panel) for panel in DASHBOARD[section["name"]]]
    assert done.stdout.strip() == f"{server.url}/team/project?nw={view['name'].removeprefix('nw-').removesuffix('-v')}"


@pytest.mark.slow
def test_a_refusal_is_shown_with_the_fix(server: WandbServer, tmp_path: Path) -> None:
    server.refusal = "project not found"
    done = dashboard(server, tmp_path)
    assert done.returncode == 2
    assert "--wandb = team/project" in done.stderr and "project not found" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_user_who_is_not_signed_in_is_told_to_sign_in(server: WandbServer, tmp_path: Path) -> None:
    done = dashboard(server, tmp_path, key="")
    assert done.returncode == 2
    assert "wandb login" in done.stderr and "Traceback" not in done.stderr
    assert server.views() == []


def test_another_form_of_the_project_is_refused() -> None:
    for destination in ("project-only", "team/", "/project", "team/project/run"):
        with pytest.raises(ConfigError, match="ENTITY/PROJECT"):
            save_workspace(destination)
