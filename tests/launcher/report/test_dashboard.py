"""The dashboard and the comparison of synthetic runs."""

import json
import re
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.errors import ConfigError
from launcher.report.dashboard import CAUSES, read_runs, write_comparison, write_dashboard
from launcher.report.svg import MAX_POINTS, Line, line_chart
from launcher.report.wandb_workspace import save_workspace
from launcher.report.write import MAX_STEPS, thinned
from rollout.tracing.timeline import Part


def write_rows(path: Path, *, num_steps: int, config: str) -> Path:
    """A run of steps of 100 s; half of each step is lost to the trainer."""
    path.mkdir()
    rows = [
        {
            "step": step,
            "time_s": 1e9 + 100.0 * (step + 1),
            "timing_s/step": 100.0,
            "reward/mean": step / num_steps,
            "timeline/elapsed_s": 100.0,
            "timeline/bubble": 0.5,
            "timeline/trainer_wait_share": 0.5,
        }
        for step in range(num_steps)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.yaml").write_text(config)
    return path


def test_a_comparison_names_differences_and_the_hours_of_each_cause(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a", num_steps=36, config="seed: 1\nengine: {format: int8}\n")
    second = write_rows(tmp_path / "b", num_steps=72, config="seed: 1\nengine: {format: bf16}\n")
    text = write_comparison([first, second], tmp_path / "page.html").read_text()
    assert "engine.format" in text and "&quot;int8&quot;" in text and "&quot;bf16&quot;" in text
    assert ">seed<" not in text, "equal keys are left out"
    # 36 steps x 100 s = 1 hour, 72 steps = 2 hours; half of it is lost
    cells = re.search(r"<td >trainer wait</td>(.*?)</tr>", text)
    assert cells is not None and re.findall(r"[\d.]+(?=</td>)", cells.group(1)) == ["0.500", "1.000"]
    assert "Learning, over hours" in text


def test_hours_begin_with_the_first_step(tmp_path: Path) -> None:
    (run,) = read_runs([write_rows(tmp_path / "a", num_steps=36, config="")])
    line = run.line("reward/mean", label="a", over_hours=True)
    assert line.at[0] == pytest.approx(100 / 3600) and line.at[-1] == pytest.approx(1.0)
    assert list(run.line("reward/mean", label="a", over_hours=False).at) == list(range(1, 37))


def test_the_causes_of_the_bubble_are_those_of_the_timeline() -> None:
    assert set(CAUSES) == {part.value for part in Part} - {"saturated"}


def test_a_page_names_no_address_and_holds_no_script(tmp_path: Path) -> None:
    run = write_rows(tmp_path / "a", num_steps=3, config="")
    for target in (write_dashboard([run], tmp_path / "d.html"), write_comparison([run, run], tmp_path / "c.html")):
        assert not re.search(r"https?:|<script|<link|<img|url\(|@import|src=", target.read_text())


def test_a_page_of_a_long_run_is_no_larger_than_that_of_a_run_at_the_bound(tmp_path: Path) -> None:
    short = write_dashboard([write_rows(tmp_path / "a", num_steps=MAX_POINTS, config="")], tmp_path / "a.html")
    long = write_dashboard([write_rows(tmp_path / "b", num_steps=10_000, config="")], tmp_path / "b.html")
    assert long.stat().st_size < 1.1 * short.stat().st_size


def test_a_chart_is_thinned_and_ends_at_the_last_point() -> None:
    size = 10 * MAX_POINTS + 1
    chart = line_chart([Line(label="a", at=range(size), values=[float(at) for at in range(size)])])
    points = re.findall(r"[\d.]+,[\d.]+", chart)
    assert len(points) <= MAX_POINTS + 1
    # the line rises from the lower left corner of the axes to the upper right one
    assert (points[0], points[-1]) == ("58.0,188.0", "452.0,8.0")


def test_a_logarithmic_chart_leaves_out_values_that_are_not_positive() -> None:
    assert line_chart([Line(label="a", at=[1, 2], values=[0.0, -1.0])], log=True) == ""
    chart = line_chart([Line(label="a", at=[1, 2, 3], values=[1.0, 10.0, 100.0])], log=True)
    assert re.findall(r"[\d.]+,[\d.]+", chart) == ["58.0,188.0", "255.0,98.0", "452.0,8.0"]


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no metrics"):
        write_dashboard([tmp_path], tmp_path / "d.html")


def test_a_workspace_without_its_package_is_refused_with_the_packages_name() -> None:
    with pytest.raises(ConfigError, match="ENTITY/PROJECT"):
        save_workspace("project-only")
    with pytest.raises(ConfigError, match="pip install wandb-workspaces"):
        save_workspace("team/project")


def test_the_report_of_a_long_run_draws_evenly_spaced_steps_and_the_last() -> None:
    rows = [{"step": float(step)} for step in range(10_000)]
    drawn = [row["step"] for row in thinned(rows)]
    assert drawn[:3] == [0.0, 25.0, 50.0] and drawn[-1] == 9999.0
    assert len(drawn) <= MAX_STEPS + 1
    assert thinned(rows[:MAX_STEPS]) == rows[:MAX_STEPS]


def test_the_commands_write_the_pages_and_refuse_what_they_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (write_rows(tmp_path / name, num_steps=3, config="") for name in ("a", "b"))
    page = tmp_path / "page.html"
    assert main(["dashboard", str(first), "--output", str(page)]) == 0
    assert "<h1>Dashboard</h1>" in page.read_text()
    assert main(["report", str(first), str(second), "--output", str(page)]) == 0
    assert "<h1>Comparison of runs</h1>" in page.read_text()
    assert main(["dashboard"]) == 2
    assert "--wandb ENTITY/PROJECT" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert "holds no metrics" in capsys.readouterr().err
