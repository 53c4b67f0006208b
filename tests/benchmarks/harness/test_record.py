"""A record names the code and the inputs of its rows, has one row a line, and no path of the machine."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.harness import record, record_file
from benchmarks.harness.record import _without_machine_path, rows_before, write
from benchmarks.harness.record_file import Goal, Input, Provenance, Record, read, read_all, text
from benchmarks.harness.record_inputs import quickstart_inputs, run_inputs, write_inputs
from benchmarks.planner.recorded_run import keys, made


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("--rounds", "--rounds"),
        ("2", "2"),
        ("benchmarks/results/a.json", "benchmarks/results/a.json"),
        ("/elsewhere/of/mine/quickstart", "quickstart"),
        ("--warm=/elsewhere/quickstart", "--warm=quickstart"),
        ("HERE/runs/a.json", "runs/a.json"),
        ("--work=HERE/runs", "--work=runs"),
    ],
)
def test_paths_are_recorded_relative_to_the_checkout_and_others_by_name(
    argument, recorded, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _without_machine_path(argument.replace("HERE", str(tmp_path))) == recorded


@pytest.fixture
def code(monkeypatch) -> Provenance:
    found = Provenance(commit="b" * 40, dirty=True)
    monkeypatch.setattr(record, "measured_code", lambda: found)
    return found


def test_a_written_record_round_trips_and_has_a_line_for_each_row(tmp_path, code) -> None:
    path = tmp_path / "made.json"
    goal = Goal(name="speed", value=2.0, bound=1.0, direction="at least", unit="x")
    given = Input(path="quickstart", command="python -m examples.arithmetic.quickstart --work quickstart")
    rows = [{"case": "a", "s": 1.5}, {"case": "b", "s": 2}]
    write(path, rows=rows, goals=[goal], not_measured=["any GPU"], inputs=[given])
    found = read(path)
    assert (found.name, found.goals, found.inputs, found.not_measured) == ("made", (goal,), (given,), ("any GPU",))
    assert found.commits == {code: 2}
    assert [json.loads(line.rstrip(",")) for line in path.read_text().splitlines() if '"case"' in line] == [
        {**row, "commit": code.commit, "dirty": True} for row in rows
    ]


def test_rows_of_an_earlier_process_keep_their_commit(tmp_path, code) -> None:
    path = tmp_path / "resumed.json"
    path.write_text(text({"rows": [{"case": "a", "commit": "a" * 40, "dirty": False}]}))
    assert rows_before(path, resume=False) == []
    write(path, rows=[*rows_before(path, resume=True), {"case": "b"}])
    assert read(path).commits == {Provenance(commit="a" * 40, dirty=False): 1, code: 1}


def test_a_benchmark_that_resumes_without_a_record_begins_one(tmp_path) -> None:
    assert rows_before(tmp_path / "none.json", resume=True) == []


@pytest.mark.parametrize("found", read_all(), ids=lambda found: found.name)
def test_committed_records_have_one_row_a_line_and_rows_name_their_code(found: Record) -> None:
    path = record_file.RESULTS / f"{found.name}.json"
    content = path.read_text(encoding="utf-8")
    assert content == text(json.loads(content))
    assert found.date
    for row in found.rows:
        assert row["commit"]
        assert not str(row["commit"]).endswith("+")
        assert row["dirty"] in (True, False, None)
    assert all(given.command.startswith("python -m ") for given in found.inputs)


def test_inputs_name_the_commands_that_make_them(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert quickstart_inputs(None) == ()
    work = tmp_path / "quickstart"
    command = "python -m examples.arithmetic.quickstart --work quickstart"
    assert quickstart_inputs(work) == (Input(path="quickstart", command=command),)
    (work / "run").mkdir(parents=True)
    (work / "run" / "config.yaml").write_text("num_steps: 20\nseed: 2\n")
    warm = Input(path="quickstart", command=f"{command} --seed 2")
    assert quickstart_inputs(work) == (warm,)
    run = tmp_path / "run"
    (run / "traces").mkdir(parents=True)
    assert [given.command for given in run_inputs(run / "traces")] == ["not recorded"]
    write_inputs(run, [warm])
    assert run_inputs(run / "traces") == run_inputs(run) == (warm,)


def test_a_recorded_run_names_its_command_and_puts_overrides_last(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = Namespace(
        warm=tmp_path / "q", out=Path("runs/traces"), prompts=8, steps=2, seed=5, overrides=["engine.num_engines=2"]
    )
    command = "python -m benchmarks.planner.recorded_run --warm q --out runs/traces --prompts 8 --steps 2 --seed 5"
    assert made(options) == Input(path="runs/traces", command=f"{command} engine.num_engines=2")
    found = keys(options, tmp_path / "few.jsonl")
    assert found[-1] == "engine.num_engines=2"
    assert {"engine.format=bf16", "num_steps=2", "seed=5"} <= set(found)
