"""The invented runs look like recorded ones, and the benchmark measures every page."""

import json
from pathlib import Path

import pytest

from benchmarks.report import __main__ as benchmark
from benchmarks.report.large_run import Size, write_large_run
from launcher.metrics.panels import DASHBOARD
from launcher.metrics.registry import find
from launcher.report.dashboard import write_dashboard
from launcher.report.write import read_record, write_report
from launcher.run_dir.atomic_files import read_rows

SIZE = Size(num_steps=600, num_engines=8, trace_bytes=1 << 20)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "run"
    write_large_run(path, SIZE, seed=0)
    return path


def test_rows_hold_registered_metrics_only_and_shares_of_the_time_sum_to_one(run_dir: Path) -> None:
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(SIZE.num_steps))
    assert [name for name in rows[0] if name not in ("step", "time_s") and find(name) is None] == []
    for row in rows[:10]:
        causes = ("underfilled", "tail_wait", "publish", "trainer_wait", "checkpoint", "gap", "other")
        assert sum(row[f"timeline/{cause}_share"] for cause in causes) == pytest.approx(row["timeline/bubble"])


def test_the_run_fills_every_panel_and_every_lane(run_dir: Path) -> None:
    text = write_dashboard([run_dir], run_dir.parent / "d.html").read_text(encoding="utf-8")
    titles = [panel.title for panels in DASHBOARD.values() for panel in panels]
    assert all(f"<figcaption>{title.replace(chr(39), '&#x27;')}" in text for title in titles)
    record = read_record(run_dir)
    assert record.timeline.notes == [] and len(record.timeline.steps) == SIZE.num_steps
    assert record.timeline.speed is not None
    text = write_report(run_dir).read_text(encoding="utf-8")
    # two nodes, each with four engines, four trainer ranks and an axis
    _, _, fleet = text.partition('id="fleet"')
    assert fleet.count('class="lane"') == 2 * 8 and fleet.count('class="lane axis"') == 2


@pytest.mark.slow
@pytest.mark.bench
def test_a_quick_run_measures_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "BROWSERS", ())
    benchmark.main(["--json", str(tmp_path / "out.json"), "--quick"])
    record = json.loads((tmp_path / "out.json").read_text())
    assert [row["page"] for row in record["rows"]] == ["dashboard", "report", "comparison"]
    assert all(0 < row["page_s"] <= row["command_s"] and row["page_bytes"] > 10_000 for row in record["rows"])
    assert "the browser: there is no Chromium on this machine" in record["not_measured"]
