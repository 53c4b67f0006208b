"""Damaged records of a run directory: no start and no save fails by them, people see the rest, and none is lost."""

import json
import math
import time
from pathlib import Path

import pytest

from launcher.errors import RunDirectoryError
from launcher.report.dashboard import write_dashboard
from launcher.report.write import write_report
from launcher.run_dir.atomic_files import read_rows, readable_rows
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.lost_work import LostWork, lost_work
from launcher.run_dir.resume import FIRST_MODEL, changed_keys, changes_since_last_start, check_first_model
from launcher.run_dir.saves import Saves
from launcher.run_dir.status import StatusFile, status_lines
from megatron_rl.algorithm.guard import GuardState
from megatron_rl.config import CheckpointConfig
from rollout.evaluation import EvaluationRow
from tests.launcher.run_dir.test_recorder import evaluation
from tests.launcher.run_dir.test_resume import run_config
from tests.launcher.run_dir.test_saves import Planner, Trainer

DAMAGED = [
    bytes(30),
    b'{"step": 1, "a{"step": 1, "a": 1.0}',
    b'{"step": 1, "a": 1.0}{"step": 2, "a": 1.0}',
    b'{"step": 1, "a\xff": 1.0}',
    b"null",
    b"[]",
    b"3",
]


def write_lines(path: Path, *lines: bytes) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def row(step: int) -> bytes:
    return json.dumps({"step": step, "time_s": 100.0 + step, "timing_s/step": 1.0}).encode()


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_named_with_the_fix_and_left_out_where_people_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, b"\xef\xbb\xbf" + row(0), b" \r", line, row(2))
    assert [each["step"] for each in readable_rows(path)[0]] == [0, 2] and readable_rows(path)[1] == 1
    with pytest.raises(RunDirectoryError, match=rf"metrics\.jsonl, line 3: holds no row.*`sed -i 3d {path}`"):
        read_rows(path)
    StatusFile(run_dir=tmp_path, num_steps=9).phase("engines", "rollout")
    assert status_lines(tmp_path, now_s=time.time())[-1] == "1 line(s) of metrics.jsonl are damaged and left out"
    found = lost_work(tmp_path, 1)
    assert isinstance(found, LostWork) and found.num_steps == 1


@pytest.mark.parametrize("line", [*DAMAGED, b"{}", b'{"step": "1"}'])
def test_a_start_moves_damaged_lines_aside_and_loses_none(tmp_path: Path, line: bytes) -> None:
    for name, last in (("metrics", row(1)), ("evaluation", json.dumps(evaluation(1, 0.5).as_row()).encode())):
        first = last.replace(b'"step": 1', b'"step": 0')
        with RunDirectory(tmp_path) as run:
            write_lines(tmp_path / f"{name}.jsonl", first, line, last)
            (note,) = run.move_damaged_lines()
            assert note == f"1 damaged line(s) of {name}.jsonl moved to {name}.abandoned.jsonl (line 2)"
            assert (tmp_path / f"{name}.jsonl").read_bytes() == first + b"\n" + last + b"\n"
            assert (tmp_path / f"{name}.abandoned.jsonl").read_bytes() == line + b"\n"
            assert run.move_damaged_lines() == []
            assert run.resume_at(1) == (name == "metrics")


def test_an_evaluation_that_lacks_a_field_is_damaged_and_one_of_a_later_version_is_not(tmp_path: Path) -> None:
    whole = evaluation(0, 0.5).as_row() | {"stderr": 0.1, "passed": 1}
    assert EvaluationRow.from_row(whole).passed == 1
    lines = [json.dumps(each).encode() for each in (whole, {"step": 0}, whole | {"average": "x"})]
    with RunDirectory(tmp_path) as run:
        write_lines(tmp_path / "evaluation.jsonl", *lines)
        assert len(run.move_damaged_lines()) == 1
        assert run.evaluation() == [whole]


def test_a_damaged_line_ends_no_save(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        write_lines(tmp_path / "metrics.jsonl", row(0), *DAMAGED, row(3))
        assert run._ended_s(3) == 103.0 and run._ended_s(1) == -math.inf


PERSONS = (
    *("samples/step-12-annotated.jsonl", "samples/step-2.old.jsonl", "samples/step-02.jsonl", "traces/step-3.c.jsonl"),
    *("traces/engine-0.backup.forwards", "traces/engine-0-old.forwards", "traces/engine-a.forwards"),
)


def test_files_of_a_person_are_left_alone(tmp_path: Path) -> None:
    RunDirectory(tmp_path).close()
    for name in PERSONS:
        (tmp_path / name).write_text("{}\n")
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {"timing_s/step": 1.0}, ended_s=time.time())
        for step in range(30):
            run.samples_path(step).write_text("{}\n")
        run.remove_samples(30, 4)
        assert {path.name for path in (tmp_path / "samples").glob("step-??.jsonl")} == {
            *(f"step-{step}.jsonl" for step in range(26, 30)),
            "step-02.jsonl",
        }
    assert write_report(tmp_path).exists()
    assert all((tmp_path / name).read_text() == "{}\n" for name in PERSONS)


def test_samples_that_cannot_be_removed_are_a_line_and_the_checkpoint_is_whole(tmp_path: Path) -> None:
    said: list[str] = []
    with RunDirectory(tmp_path) as run:
        (tmp_path / "samples" / "step-1.jsonl").mkdir()
        config = CheckpointConfig(keep_last=2, background=False, keep_last_samples=1)
        saves = Saves(run, config, history=None, say=said.append)
        saves.begin(4, Trainer([]), Planner(), GuardState())
        found = run.latest_checkpoint()
    assert found is not None and found[0] == 4
    (line,) = said
    assert line.startswith("older samples and traces could not be removed: ") and "step-1.jsonl" in line


@pytest.mark.parametrize("text", ["", "[]", "3", '{"earlier": 7}', '{"commit": "a"', "\x00"])
def test_a_damaged_environment_is_kept_aside_and_the_start_goes_on(tmp_path: Path, text: str) -> None:
    with RunDirectory(tmp_path) as run:
        assert run.write_environment({"commit": "a"}) == []
        (tmp_path / "environment.json").write_text(text)
        assert run.write_environment({"commit": "b"}) == [
            "environment.json is damaged and now named environment.damaged.json"
        ]
    assert (tmp_path / "environment.damaged.json").read_text() == text
    assert json.loads((tmp_path / "environment.json").read_text())["commit"] == "b"


@pytest.mark.parametrize("text", [b"\xff", b"seed: [", b"seed: 2026-02-30", b"", b"7", b"seed: \x00"])
def test_a_resume_with_a_damaged_configuration_is_refused_with_the_fix(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(RunDirectoryError, match=r"config\.yaml, .* is damaged .*remove it to resume"):
        changed_keys(tmp_path, run_config())
    assert changes_since_last_start(tmp_path, run_config()) == []


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff"])
def test_a_resume_with_a_damaged_digest_of_the_model_is_refused_with_the_fix(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FIRST_MODEL).write_bytes(text)
    with pytest.raises(RunDirectoryError, match=r"model\.json is damaged.*remove that file"):
        check_first_model(tmp_path, tmp_path, resumes=True)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[]", b"3", b'{"engines": 3}', b"trainer: {parallel: 3}\n"])
def test_the_report_and_the_dashboard_show_the_rest_of_a_damaged_run(tmp_path: Path, text: bytes) -> None:
    names = ["environment.json", "places.json", "config.yaml"]
    with RunDirectory(tmp_path / "run") as run:
        run.append_metrics(0, {"timing_s/step": 1.0, "reward/mean": 0.5}, ended_s=time.time())
        run.samples_path(0).write_bytes(b'{"reward": 1.0, "prompt": "whole"}\nnull\n')
    for name in names:
        (tmp_path / "run" / name).write_bytes(text)
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        with (tmp_path / "run" / name).open("ab") as file:
            file.write(b"\x00\n" if name == "metrics.jsonl" else b'{"step": 0}\n')
    page = write_report(tmp_path / "run").read_text()
    for name in ("metrics.jsonl", "evaluation.jsonl", "step-0.jsonl"):
        assert f"1 line(s) of {name} are damaged and left out." in page
    assert "places.json is damaged and left out." in page and "whole" in page and ">1 steps" in page
    dashboard = write_dashboard([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "run: 1 line(s) of metrics.jsonl are damaged and left out." in dashboard


def test_the_report_and_the_dashboard_leave_out_a_row_whose_step_is_no_number(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        run.append_metrics(0, {"timing_s/step": 1.0, "reward/mean": 0.5}, ended_s=time.time())
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": NaN, "time_s": 1.0, "reward/mean": 0.5}\n')
    said = "1 line(s) of metrics.jsonl are damaged and left out."
    assert said in write_report(tmp_path / "run").read_text()
    assert said in write_dashboard([tmp_path / "run"], tmp_path / "page.html").read_text()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_status_with_a_number_that_is_none_is_shown(tmp_path: Path, value: float) -> None:
    StatusFile(run_dir=tmp_path, num_steps=9).phase("engines", "rollout")
    record = json.loads((tmp_path / "status.json").read_text())
    for key in ("since_s", "written_s", "alive_s", "num_steps"):
        (tmp_path / "status.json").write_text(json.dumps(record | {key: value}))
        write_lines(tmp_path / "metrics.jsonl", json.dumps({"step": 0, "timing_s/step": value}).encode())
        assert any(line.startswith("last 1 step(s)") for line in status_lines(tmp_path, now_s=time.time()))
