"""The goals of the soak and the page of its record, on figures that are made up."""

import json
import random
import time
from pathlib import Path

import pytest

from benchmarks.faults import soak
from benchmarks.faults.soak import Hit, Storm, goals
from benchmarks.harness import record
from benchmarks.harness.process_tree import Usage
from benchmarks.harness.record_file import Goal, read
from benchmarks.harness.record_pages import pages
from benchmarks.harness.record_views import VIEWS

REWARD = "reward of the same steps, disturbed minus undisturbed"
MEMORY = 1 << 30


def steps(count: int, *, gain: float = 0.0) -> list[dict[str, float]]:
    """Rewards that rise with the steps, which end 10 s after each other from 1,000 s on."""
    return [{"step": n, "reward/mean": 0.01 * n + gain, "time_s": 1000.0 + 10 * n} for n in range(count)]


def usages(*, memory: float = 1.0, descriptors: float = 1.0, shared: float = 1.0) -> list[Usage]:
    """Two hours, in whose last quarter resources are so many times as large as in the second one."""
    return [
        Usage(
            seconds=float(second),
            memory_bytes=int(MEMORY * (memory if second >= 5400 else 1)),
            shm_bytes=int(MEMORY * (shared if second >= 5400 else 1)),
            num_fds=int(1000 * (descriptors if second >= 5400 else 1)),
            num_processes=20,
        )
        for second in range(0, 7201, 10)
    ]


def found(stormy: list[dict[str, float]], samples: list[Usage], *, num_hung: int = 0) -> dict[str, Goal]:
    return {goal.name: goal for goal in goals(steps(60), stormy, samples, minutes=120.0, num_hung=num_hung)}


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of other runs on this machine."""
    monkeypatch.setattr(soak, "left_behind", list)


def test_rewards_of_the_same_steps_are_compared_although_the_disturbed_run_goes_further() -> None:
    met = found(steps(200), usages())
    assert met[REWARD].value == pytest.approx(0.0) and all(goal.met for goal in met.values())
    worse = found(steps(200, gain=-0.04), usages())
    assert worse[REWARD].value == pytest.approx(-0.04) and not worse[REWARD].met


def test_a_disturbed_run_that_ends_early_is_compared_as_far_as_it_came() -> None:
    early = found(steps(30), usages())
    assert early[REWARD].value == pytest.approx(0.0)
    assert [name for name, goal in early.items() if not goal.met] == ["steps, each once"]


@pytest.mark.parametrize(
    ("growth", "missed"),
    [
        ({"memory": 1.06}, "memory, growth"),
        ({"descriptors": 1.04}, "descriptors, growth"),
        ({"shared": 1.2}, "shared memory, growth"),
    ],
)
def test_growth_of_a_resource_misses_its_goal(growth: dict[str, float], missed: str) -> None:
    (share,) = growth.values()
    of_growth = found(steps(200), usages(**growth))
    assert [name for name, goal in of_growth.items() if not goal.met] == [missed]
    assert of_growth[missed].value == pytest.approx(share - 1, rel=1e-3)


def test_a_step_that_is_missing_or_there_twice_and_a_hung_start_miss_their_goals() -> None:
    for rows in (steps(80)[:40] + steps(80)[41:], [*steps(80), steps(80)[-1]]):
        assert not found(rows, usages())["steps, each once"].met
    assert not found(steps(200), usages(), num_hung=1)["starts that hung"].met


def test_a_record_has_a_page_with_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.sys, "argv", ["soak.py", "--json", str(tmp_path / "fault_soak.json")])
    storm = Storm(work=tmp_path, generator=random.Random(0), ends_s=time.monotonic())
    places = [("engine core", "kill", 25.0), ("engine core", "kill", 75.0), ("scorer", "freeze", 2000.0)]
    storm.hits = [
        Hit(second=second, time_s=1000 + second, role=role, fault=fault, phase="train", step=2, start=1)
        for role, fault, second in places
    ]
    rows = storm.rows(steps(60))
    assert [row.get("until_next_step_s") for row in rows] == [5.0, 5.0, None]  # no step ended after the last one
    path = tmp_path / "fault_soak.json"
    record.write(path, rows=rows, goals=list(found(steps(60), usages()).values()), not_measured=["any GPU"])
    assert json.loads(path.read_text())["rows"]
    page = pages([read(path)], {"fault_soak": VIEWS["fault_soak"]})["fault_soak.md"]
    assert "In 120 minutes, 60 steps ended; the same steps earn 0 more than undisturbed" in page
    assert "| engine core | kill | 5 | 5 | 5 | 1.25 |" in page and "| scorer | freeze | - | - | - | 33.3 |" in page
