"""The meter of the controller, and the quick run over stand-ins."""

import json
import time
from pathlib import Path

import pytest

from benchmarks.control_plane import __main__ as benchmark
from benchmarks.control_plane.meter import ALL, Meter
from benchmarks.harness.record import Row


class Busy:
    def work(self, seconds: float) -> float:
        began = time.process_time()
        while time.process_time() - began < seconds:
            pass
        return seconds

    def rest(self) -> None:
        time.sleep(0.05)


def test_cpu_time_belongs_to_the_outermost_part_of_the_step() -> None:
    meter = Meter()
    inner = meter.wrap(Busy(), {"work": "inner", "rest": "inner"})
    outer = meter.measured("outer", lambda: inner.work(0.05))
    outer()
    inner.rest()
    meter.end_step()
    assert inner.work(0.05) == 0.05
    meter.end_step()
    first, second = meter.steps
    assert first["outer"] == pytest.approx(0.05, abs=0.03) and first.get("inner", 0.0) < 0.03
    assert second["inner"] == pytest.approx(0.05, abs=0.03) and "outer" not in second
    assert second[ALL] >= second["inner"]


def test_stored_bytes_are_those_of_each_step() -> None:
    created = iter([100, 150, 400]).__next__
    meter = Meter(created)
    meter.end_step()
    meter.end_step()
    assert meter.stored_bytes == [50, 250]


@pytest.mark.parametrize(("scales", "growth"), [([512], []), ([8, 64, 512], [1 / 3]), ([512, 64], [1 / 3])])
def test_growth_is_told_from_the_second_largest_scale_if_any(scales: list[int], growth: list[float]) -> None:
    rows: list[Row] = [{"scale": scale, "part": ALL, "cpu_s": 3 * (scale / 512) ** (1 / 3)} for scale in scales]
    share, *others = benchmark._goals(rows, scales)
    assert share.value == pytest.approx(0.01) and "at 512" in share.name
    assert [goal.value for goal in others] == pytest.approx(growth)


@pytest.mark.slow
@pytest.mark.bench
def test_a_quick_run_measures_every_part(tmp_path: Path) -> None:
    benchmark.main(["--json", str(tmp_path / "out.json"), "--quick"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    parts = {"all", "batch", "history", "plan", "pool", "publish", "record", "train calls"}
    assert {row["part"] for row in rows if row["scale"] == 16} == parts
    assert all(row["cpu_s"] >= 0 for row in rows)
    stored = {row["scale"]: row["stored_bytes"] for row in rows}
    assert 0 < stored[8] < stored[16]
