"""The table of faults, the verdict over a disturbed run, and cells of the table in earnest.

`FAULTS_SEED` draws another cell than that of the commit.
"""

import asyncio
import fcntl
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.faults import __main__ as command
from benchmarks.faults import cells as cells_module
from benchmarks.faults import inject
from benchmarks.faults import outcome as verdict
from benchmarks.faults.cells import PHASES, ROLES, WHOLE_JOB, Cell, cells
from benchmarks.faults.example import NUM_STEPS, SLOW_REWARD, write_config
from benchmarks.faults.inject import Ended, run_disturbed, victims
from benchmarks.faults.outcome import left_behind, total
from benchmarks.harness.record import Row
from benchmarks.harness.record_file import read_rows
from benchmarks.harness.record_views.faults import FAULTS
from history.index.segments_dir import claim
from launcher.cluster.node import source_commit
from rollout.config import RewardConfig
from rollout.rewards.call import RewardRequest
from rollout.rewards.workers import RewardWorkers
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import OF_VLLM

CELL = Cell(role="trainer rank", fault="kill", phase="train", run="exact")
FROZEN_CONTROLLER = Cell(role="controller", fault="freeze", phase="scoring", run="exact")
SUSPENDED_JOB = Cell(role=WHOLE_JOB, fault="freeze", phase="scoring", run="exact")


def run_dir(folder: Path, *, responses: int = 16, weights: bytes = b"w", loss: float = 1.0) -> Path:
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "model.safetensors").write_bytes(weights)
    steps = [
        {"step": step, "batch/responses": responses, "actor/loss": loss, "time_s": 100.0 + 6 * step}
        for step in range(NUM_STEPS)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def test_the_table_has_every_process_in_every_phase_once() -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names))
    assert {cell.role for cell in cells()} == set(ROLES)
    of_trainer = {(cell.fault, cell.phase) for cell in cells() if cell.role == "trainer rank" and cell.run == "exact"}
    assert of_trainer == {(fault, phase) for fault in ("kill", "freeze") for phase in PHASES if phase != "scoring"}
    assert FROZEN_CONTROLLER in cells() and SUSPENDED_JOB in cells()


def test_scoring_is_hit_in_the_rollout_that_samples() -> None:
    moments = {(cell.run, cell.moment.phase, cell.moment.step) for cell in cells() if cell.phase == "scoring"}
    assert moments == {("exact", "rollout", 1), ("drafting", "rollout", 1), ("ahead", "rollout", 0)}
    assert all(cell.moment.scores == (cell.phase == "scoring") for cell in cells())


@pytest.mark.parametrize(
    ("codes", "changes", "is_as_promised"),
    [
        ((0,), {}, True),
        ((-9, 0), {}, True),
        ((9, 9, 9), {}, False),
        ((None,), {}, False),
        ((0,), {"responses": 15}, False),
        ((0,), {"loss": 1.001}, False),
        ((0,), {"weights": b"v"}, False),
    ],
)
def test_a_run_is_as_promised_if_it_ended_and_equals_the_undisturbed_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: tuple[int | None, ...],
    changes: dict[str, object],
    is_as_promised: bool,
) -> None:
    monkeypatch.setattr(verdict, "left_behind", list)
    calm, found = run_dir(tmp_path / "calm"), run_dir(tmp_path / "found", **changes)
    ended = Ended(codes=codes, hit_at_s=101.0, ended_at_s=110.0)
    row = verdict.outcome(CELL, found, calm, ended)
    assert row["as_promised"] is is_as_promised
    assert row["until_next_step_s"] == 5.0  # the second step ended 106 s after the begin
    monkeypatch.setattr(verdict, "left_behind", lambda: [Path("mrl-x")])
    assert not verdict.outcome(CELL, found, calm, ended)["as_promised"]


def test_a_cell_whose_process_was_not_there_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "left_behind", list)
    calm, found = run_dir(tmp_path / "calm"), run_dir(tmp_path / "found")
    assert not verdict.outcome(CELL, found, calm, Ended(codes=(0,), hit_at_s=None, ended_at_s=9.0))["as_promised"]


def test_shared_memory_of_a_living_process_is_not_left_behind(tmp_path: Path) -> None:
    folder = tmp_path / "mrl-history-a-1"
    claimed = claim(folder)
    held, free = tmp_path / "mrl-a-1-w0-r0", tmp_path / "mrl-b-2-w0-r0"
    for path in (held, free, tmp_path / "other"):
        path.touch()
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert left_behind(tmp_path) == [free]
    assert set(left_behind(tmp_path)) == {held, free}
    os.close(claimed)
    assert set(left_behind(tmp_path)) == {held, free, folder}


@pytest.mark.parametrize("verdicts", [(True, True), (True, False), (False, True)])
def test_the_command_fails_if_a_row_is_not_as_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdicts: tuple[bool, bool]
) -> None:
    """One row is of this process, the other one of an earlier process."""
    record = tmp_path / "faults.json"
    monkeypatch.setattr(command, "make_example", lambda work: None)
    monkeypatch.setattr(command, "_undisturbed", lambda work, kind: None)
    codes = []
    for phase, is_as_promised in zip(("train", "publish"), verdicts, strict=True):

        def disturbed(work: Path, cell: Cell, *, seed: int, says: bool = is_as_promised) -> Row:
            return {"cell": cell.name, "as_promised": says}

        monkeypatch.setattr(command, "_disturbed", disturbed)
        options = ["--json", str(record), "--work", str(tmp_path / "work"), "--resume"]
        codes.append(command.main([*options, "--only", f"exact: kill trainer rank in {phase}$"]))
    assert [row["as_promised"] for row in read_rows(record)] == list(verdicts)
    assert codes == [int(not verdicts[0]), int(not all(verdicts))]


def test_a_pattern_that_finds_no_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command.main(["--json", str(tmp_path / "faults.json"), "--only", "trainer ranks"])


def test_totals_add_up_over_the_starts_of_a_run() -> None:
    steps = [{"a": 0.0}, {"a": 2.0}, {"a": 2.0}, {"a": 1.0}, {"a": 1.0}, {}, {"a": 3.0}]
    assert (total(steps, "a"), total(steps, "b")) == (6.0, 0.0)


def test_a_row_tells_what_was_repeated_and_old_rows_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "left_behind", list)
    calm, found = run_dir(tmp_path / "calm"), run_dir(tmp_path / "found")
    steps = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    counted = {"engine/reissued_groups": 3, "publish/repeated": 1, "reward/scorer_restarts": 2}
    (found / "metrics.jsonl").write_text("".join(json.dumps({**step, **counted}) + "\n" for step in steps))
    row = verdict.outcome(CELL, found, calm, Ended(codes=(0,), hit_at_s=101.0, ended_at_s=110.0))
    assert row["as_promised"], "what was repeated is no difference"
    assert {column: row[column] for column in verdict.REPEATED} == {
        "reissued_groups": 3,
        "repeated_publishes": 1,
        "scorer_restarts": 2,
        "repeated_calls": 0,
    }
    old = {name: value for name, value in row.items() if name not in verdict.REPEATED} | {"fault": "freeze"}
    _, _, new_line, old_line = FAULTS.tables[1].markdown([row, old])
    assert new_line.endswith("| 3 | 1 | 2 | 0 |")
    assert old_line.endswith("| - | - | - | - |")


def test_scoring_is_hit_only_while_a_call_is_under_way_and_a_worker_only_if_it_has_one(tmp_path: Path) -> None:
    config = RewardConfig(**SLOW_REWARD | {"num_workers": 2, "timeout_s": DEADLINE_S})
    request = RewardRequest(
        function=config.function, data_source="", solution_str="7", ground_truth="7", extra_info_json="null"
    )
    run = SimpleNamespace(pid=os.getpid())

    def hit(role: str) -> list[int]:
        cell = Cell(role=role, fault="kill", phase="scoring", run="exact")
        return [process.pid for process in victims(run, cell)]  # type: ignore[arg-type]

    async def score() -> float:
        workers = RewardWorkers(config)
        await workers.start()
        while sum(worker.pid > 0 for worker in workers._workers.values()) < 2:
            await asyncio.sleep(0.01)
        assert hit("server of reward workers") == hit("reward worker") == hit("controller") == []
        outcome = workers.submit(request)
        while not hit("reward worker"):
            await asyncio.sleep(0.01)
        (busy,) = [worker.pid for worker in workers._workers.values() if worker.calls]
        assert hit("reward worker") == [busy]
        assert workers._server is not None
        assert hit("server of reward workers") == [workers._server.pid] and hit("controller") == [run.pid]
        reward = (await outcome).reward
        await workers.close()
        return reward

    assert asyncio.run(score()) == 1.0


def test_a_frozen_controller_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "FROZEN_S", 0.5)
    seen = []
    sleep = inject.time.sleep
    process = subprocess.Popen(["sleep", "3600"])

    def look_and_sleep(seconds: float) -> None:
        sleep(seconds)
        seen.append((seconds, psutil.Process(process.pid).status()))

    monkeypatch.setattr(inject, "time", SimpleNamespace(sleep=look_and_sleep, time=inject.time.time))
    (tmp_path / "status.json").write_text(json.dumps({"phase": "rollout", "step": 1, "part": ""}))
    cell = Cell(role="controller", fault="freeze", phase="rollout", run="exact")
    try:
        assert inject._disturb(process, tmp_path, cell, random.Random(0)) is not None
        assert seen[-1] == (0.5, psutil.STATUS_STOPPED)
        assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    finally:
        process.kill()
        process.wait()


def test_a_suspended_job_stops_and_goes_on_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_module, "SUSPENDED_S", 0.5)
    process = subprocess.Popen(["sh", "-c", "sleep 3600 & sleep 3600"])
    seen = []
    sleep = inject.time.sleep

    def look_and_sleep(seconds: float) -> None:
        sleep(seconds)
        seen.append((seconds, [each.status() for each in inject.targets(process, WHOLE_JOB)]))

    monkeypatch.setattr(inject, "time", SimpleNamespace(sleep=look_and_sleep, time=inject.time.time))
    (tmp_path / "status.json").write_text(json.dumps({"phase": "rollout", "step": 1, "part": ""}))
    cell = Cell(role=WHOLE_JOB, fault="freeze", phase="rollout", run="exact")
    try:
        while len(found := inject.targets(process, WHOLE_JOB)) < 3:
            sleep(0.01)
        assert inject._disturb(process, tmp_path, cell, random.Random(0)) is not None
        assert seen[-1] == (0.5, [psutil.STATUS_STOPPED] * 3)
        assert psutil.STATUS_STOPPED not in [each.status() for each in found]
    finally:
        for each in inject.targets(process, WHOLE_JOB):
            each.kill()
        process.wait()


def seed_of_the_day() -> int:
    """`FAULTS_SEED`, or what the commit gives; the day, where there is no git."""
    if given := os.environ.get("FAULTS_SEED"):
        return int(given)
    commit = source_commit().rstrip("+")
    return int(commit[:8], 16) if commit else date.today().toordinal()


@pytest.fixture(scope="module")
def calm(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a deterministic run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("calm") / "calm"
    with pytest.MonkeyPatch.context() as patch:
        for name in OF_VLLM:
            patch.delenv(name, raising=False)
        ended = run_disturbed(write_config(example, "exact"), run_dir, None, seed=0)
    assert ended.codes == (0,), run_dir.with_suffix(".log").read_text()[-4000:]
    return run_dir


@pytest.fixture
def disturb(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[Cell, int], Row]:
    """Runs a cell, which must be as promised, and returns its row."""
    for name in OF_VLLM:
        monkeypatch.delenv(name, raising=False)

    def run(cell: Cell, seed: int) -> Row:
        undisturbed = request.getfixturevalue("calm") if cell.run == "exact" else tmp_path
        before = set(left_behind())  # of other tests
        monkeypatch.setattr(verdict, "left_behind", lambda: sorted(set(left_behind()) - before))
        config = write_config(example, cell.run, scores_slowly=cell.moment.scores)
        ended = run_disturbed(config, tmp_path / "disturbed", cell, seed=seed)
        row = verdict.outcome(cell, tmp_path / "disturbed", undisturbed, ended)
        assert row["as_promised"], (row, (tmp_path / "disturbed.log").read_text()[-4000:])
        shutil.rmtree(tmp_path)
        return row

    return run


@pytest.mark.slow
@pytest.mark.long
def test_a_random_fault_leaves_no_trace(disturb: Callable[[Cell, int], Row]) -> None:
    seed = seed_of_the_day()
    cell = random.Random(seed).choice(cells())
    print(f"{cell.name}, drawn with FAULTS_SEED={seed}")
    disturb(cell, seed)


@pytest.mark.slow
@pytest.mark.long
def test_a_run_whose_controller_is_frozen_and_continued_blames_nobody(disturb: Callable[[Cell, int], Row]) -> None:
    """It is frozen for longer than the deadlines of engines, of the trainer's progress and of reward calls."""
    row = disturb(FROZEN_CONTROLLER, 0)
    assert row["starts"] == 1 and row["until_next_step_s"] > cells_module.FROZEN_S
    repeated = ("trainer_restarts", "engine_restarts", "repeated_steps", *verdict.REPEATED)
    assert {name: row[name] for name in repeated} == dict.fromkeys(repeated, 0)
