"""The last weights of a run: exported once, and again where an earlier start could not, or left those of another step.
They are evaluated once, also if a stop request comes in between; a report that fails is no failure of the run.

Ray, engines and trainer are stand-ins; the run directory is real.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.checks.check import CheckedRun, check_run
from launcher.cluster.node import NodeResources
from launcher.commands import assembly
from launcher.commands import evaluate as evaluation
from launcher.commands import run as module
from launcher.commands.assembly import Shown
from launcher.commands.resume_point import ResumePoint, resume_point
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import EvalConfig, RunConfig
from launcher.endings import conclusion
from launcher.endings.conclusion import Command, conclude
from launcher.endings.kinds import judge
from launcher.errors import RunDirectoryError
from launcher.run_dir import stop_request
from launcher.run_dir.atomic_files import read_rows
from launcher.run_dir.checkpoints import Checkpoints
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.exported import replace_policy
from launcher.run_dir.resume import changes_since_last_start
from launcher.run_dir.status import StatusFile
from launcher.run_dir.stop_request import write_request
from megatron_rl.algorithm.guard import Action
from megatron_rl.controller.stopping import StopRequestedError
from megatron_rl.ranks import TrainerRank
from megatron_rl.trainer.messages import TrainerSpec
from rollout.data.order import OrderState
from rollout.evaluation import EvaluationRow, changes, settings_digest
from rollout.failures import DeadlineError
from rollout.pool.callbacks import Progress

LAST = 3


class Machine:
    """Stands for Ray, and for the trainer that it starts; `log` has what they were asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fault: Exception | None = None
        """Of the next export."""
        self.weights = ""
        self.ranks = SimpleNamespace(kill_and_wait=lambda: self.log.append("end"))
        self.nodes = ()

    @contextmanager
    def processes(self, *given: object, **named: object) -> Iterator["Machine"]:
        yield self

    def start_trainer(self, spec: TrainerSpec, ranks: Sequence[TrainerRank]) -> "Machine":
        folder = Path(spec.exports)
        assert folder.name == "trainer" and folder.is_dir()
        self.weights = f"weights of step {folder.parent.name}"
        self.log.append(f"start {len(ranks)} rank(s)")
        return self

    def end_trainer(self, trainer: "Machine") -> None:
        assert trainer is self

    def end(self, actors: Sequence[object]) -> None:
        """Engines and scorers are not started."""

    def export(self, path: str) -> None:
        self.log.append("export")
        target = Path(path)
        target.mkdir()
        if self.fault is not None:
            raise self.fault
        (target / "model.safetensors").write_text(self.weights)

    def execute(
        self,
        checked: CheckedRun,
        directory: RunDirectory,
        shown: Shown,
        running: "Machine",
        resume: ResumePoint,
        actions: Sequence[Action],
    ) -> None:
        """Steps, the last checkpoint, the export."""
        self.log.append(f"steps from {resume.first_step}")
        step = checked.config.num_steps
        save(directory, step)
        self.weights = f"weights of step {step}"
        replace_policy(directory.path, step, self.export)

    def evaluate(
        self,
        config: RunConfig,
        models: Mapping[int, evaluation.Weights],
        running: "Machine",
        progress: RunProgress,
        check: Callable[[], None],
    ) -> list[object]:
        for step, model in models.items():
            if step:
                self.log.append(f"evaluate {(Path(model.directory) / 'model.safetensors').read_text()} as step {step}")
        return []


def save(directory: RunDirectory, step: int) -> None:
    folder = directory.begin_checkpoint(step)
    (folder / "trainer").mkdir()
    (folder / "state.json").write_text(json.dumps({"prompt_order": OrderState(fingerprint="").to_json()}))
    directory.finish_checkpoint(step, 2)


def shown_of(directory: RunDirectory) -> Shown:
    status = StatusFile(run_dir=directory.path, num_steps=LAST)
    return Shown(progress=RunProgress(LAST), status=status, command=Command(name="run"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(module, "processes", machine.processes)
    monkeypatch.setattr(module, "execute", machine.execute)
    monkeypatch.setattr(module, "evaluate_directories", machine.evaluate)
    return machine


Start = Callable[..., list[str]]


@pytest.fixture
def start(write_config: Callable[[str], Path], node: NodeResources, tmp_path: Path, machine: Machine) -> Start:
    """Starts a run of the directory `run` with overrides; returns what Ray and the trainer were asked for."""

    def start(*overrides: str, sets: bool = False) -> list[str]:
        (tmp_path / "set.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
        more = (
            f"evaluation:\n  sets:\n    a: {{path: {tmp_path / 'set.jsonl'}, max_response_tokens: 64}}\n"
            if sets
            else ""
        )
        checked = check_run(load(RunConfig, write_config(more), overrides), [node])
        with RunDirectory(tmp_path / "run") as directory:
            machine.log.clear()
            module._run_engines(checked, directory, shown_of(directory), resume_point(directory), ())
        return list(machine.log)

    return start


def weights_of(tmp_path: Path) -> str:
    return (tmp_path / "run" / "policy" / "model.safetensors").read_text()


def test_a_run_whose_export_failed_after_its_last_checkpoint_exports_at_the_next_start(
    start: Start, machine: Machine, tmp_path: Path
) -> None:
    machine.fault = OSError("no space left on device")
    with pytest.raises(OSError, match="no space"):
        start()
    machine.fault, machine.weights = None, ""
    assert start() == ["start 1 rank(s)", "export", "end"]
    assert weights_of(tmp_path) == "weights of step 3"
    assert start() == [], "it is exported already"


def test_an_export_of_an_earlier_end_of_the_run_is_not_evaluated_as_its_last_weights(
    start: Start, machine: Machine, tmp_path: Path
) -> None:
    start("num_steps=2")
    machine.fault = OSError("no space left on device")
    with pytest.raises(OSError, match="no space"):
        start()
    assert weights_of(tmp_path) == "weights of step 2", "a failed export leaves the one before"
    machine.fault = None
    assert start(sets=True)[-1] == "evaluate weights of step 3 as step 3"
    assert start(sets=True) == ["evaluate weights of step 3 as step 3"]


def test_an_export_of_unknown_step_is_replaced(start: Start, tmp_path: Path) -> None:
    start()
    policy = tmp_path / "run" / "policy"
    for child in policy.iterdir():
        child.unlink()
    (policy / "model.safetensors").write_text("by an earlier version")
    assert start(sets=True)[-1] == "evaluate weights of step 3 as step 3"


def test_a_run_with_fewer_steps_than_it_has_taken_evaluates_its_last_weights_as_what_they_are(start: Start) -> None:
    start()
    assert start("num_steps=2", sets=True) == ["evaluate weights of step 3 as step 3"]


def test_an_export_of_a_step_that_is_taken_again_does_not_count(start: Start, machine: Machine, tmp_path: Path) -> None:
    """The second time the last step may have other weights."""
    start("num_steps=2")
    start()
    (tmp_path / "run" / "checkpoints" / "latest").write_text("2\n")
    machine.fault = OSError("no space left on device")
    with pytest.raises(OSError, match="no space"):
        start()
    machine.fault = None
    assert start() == ["start 1 rank(s)", "export", "end"]


def test_engines_sleep_before_the_last_export_also_where_only_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The repetition begins with a publish, after which the engines hold the memory of the device."""
    log: list[str] = []

    class Trainer:
        def export(self, path: str) -> None:
            log.append("export")
            Path(path).mkdir()

    sharing = SimpleNamespace(to_trainer=lambda: log.append("to trainer"))
    controller = SimpleNamespace(run=lambda: log.append("run"))
    monkeypatch.setattr(assembly, "device_sharing", lambda config, trainer, engines: sharing)
    monkeypatch.setattr(
        assembly,
        "_with_controller",
        lambda parts, attempt, resume: SimpleNamespace(
            workers=attempt.workers, sharing=attempt.sharing, controller=controller
        ),
    )
    parts = SimpleNamespace(
        checked=SimpleNamespace(config=SimpleNamespace(num_steps=LAST)), directory=SimpleNamespace(path=tmp_path)
    )
    workers = SimpleNamespace(trainer=Trainer(), engines=None)
    assembly._take_steps(parts, workers, ResumePoint(first_step=LAST))
    assert log == ["run", "to trainer", "export"]
    sharing = None
    assembly._take_steps(parts, workers, ResumePoint(first_step=LAST))


def test_a_changed_configuration_is_refused_at_any_checkpoint_before_records_are_moved(
    write_config: Callable[[str], Path], node: NodeResources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at one of step 0, which a run stopped before its first step may have."""
    checked = check_run(load(RunConfig, write_config("")), [node])
    monkeypatch.setattr(module, "_run", lambda *given: pytest.fail("the run has begun"))
    with RunDirectory(tmp_path / "run") as directory:
        directory.write_config(resolved_yaml(checked.config.model_copy(update={"seed": 99})))
        save(directory, 0)
        directory.append_metrics(0, {"a": 1.0}, ended_s=1.0)
    with pytest.raises(RunDirectoryError, match="seed: 99 -> "):
        module.run(checked, Command(name="run"))
    assert not (tmp_path / "run" / "metrics.abandoned.jsonl").exists()


def test_a_start_without_a_checkpoint_may_change_every_key_and_says_so(
    write_config: Callable[[str], Path],
    node: NodeResources,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load(RunConfig, write_config(""))
    monkeypatch.setattr(module, "_run", lambda *given: None)
    monkeypatch.setattr(module, "write_report", lambda run_dir: run_dir / "report.html")
    module.run(check_run(config, [node]), Command(name="run"))
    assert "changed since" not in capsys.readouterr().out, "it is the first start"
    elsewhere = config.model_copy(update={"run_dir": f"{tmp_path}/./run"})
    module.run(check_run(elsewhere, [node]), Command(name="run"))
    assert "changed since" not in capsys.readouterr().out
    with RunDirectory(tmp_path / "run") as directory:
        directory.append_metrics(0, {"a": 1.0}, ended_s=1.0)
    before = config.trainer.optimizer.learning_rate
    changed = load(RunConfig, write_config(""), ["seed=7", "trainer.optimizer.learning_rate=0.5"])
    module.run(check_run(changed, [node]), Command(name="run"))
    said = [line.partition("changed since the last start: ")[2] for line in capsys.readouterr().out.splitlines()]
    assert sorted(filter(None, said)) == [
        f"seed: {config.seed} -> 7",
        f"trainer.optimizer.learning_rate: {before} -> 0.5",
    ]


@pytest.mark.parametrize("text", ["", "seed: [", "7"])
def test_a_saved_configuration_that_cannot_be_read_keeps_no_run_without_a_checkpoint_from_its_start(
    write_config: Callable[[str], Path], tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert changes_since_last_start(tmp_path, load(RunConfig, write_config(""))) == []


def test_the_message_about_a_damaged_checkpoint_leads_to_the_one_before_and_not_to_an_abandoned_course(
    tmp_path: Path,
) -> None:
    """After a return from 300 to 200 by hand, the checkpoint of 300 stays."""
    folder = tmp_path / "run" / "checkpoints"
    with RunDirectory(tmp_path / "run") as directory:
        for step in (100, 200, 300, 250):
            save(directory, step)
        (folder / "250" / "state.json").write_text("{")
        with pytest.raises(
            RunDirectoryError, match=r"250 has no readable state .*; remove that folder and write"
        ) as it:
            resume_point(directory)
        number, path = re.search(r"write (\d+) into (\S+) to resume", str(it.value)).groups()  # type: ignore[union-attr]
        shutil.rmtree(folder / "250")
        Path(path).write_text(f"{number}\n")
        assert resume_point(directory).first_step == 200
        for step in (100, 200):
            shutil.rmtree(folder / str(step), ignore_errors=True)
        save(directory, 200)
        (folder / "200" / "state.json").unlink()
        with pytest.raises(
            RunDirectoryError, match=rf"no checkpoint before it is left; to begin anew, remove {folder}"
        ):
            resume_point(directory)


def test_the_message_about_a_damaged_checkpoint_tells_courses_apart_by_their_times(tmp_path: Path) -> None:
    """Step 230 is of a course that was stopped, before a return to 100 by hand; 200 is of the course of 300."""
    for minute, step in enumerate((100, 230, 200, 300)):
        folder = tmp_path / str(step)
        folder.mkdir()
        saved_s = datetime(2026, 1, 2, 12, minute).timestamp()
        os.utime(folder, (saved_s, saved_s))
    assert Checkpoints(tmp_path).instead_of(300) == (
        f"remove that folder and write the step to resume from into {tmp_path / 'latest'}: "
        "230 (saved 2026-01-02 12:01), 200 (saved 2026-01-02 12:02), 100 (saved 2026-01-02 12:00); a later step that "
        "was saved earlier is of a course that a return by hand abandoned"
    )


def test_a_run_whose_newest_checkpoint_is_gone_is_refused_and_keeps_its_records(
    write_config: Callable[[str], Path], node: NodeResources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = check_run(load(RunConfig, write_config("")), [node])
    monkeypatch.setattr(module, "_run", lambda *given: pytest.fail("the run has begun"))
    with RunDirectory(tmp_path / "run") as directory:
        save(directory, 1)
        save(directory, 2)
        directory.append_metrics(0, {"a": 1.0}, ended_s=1.0)
    (tmp_path / "run" / "checkpoints" / "2").rename(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match=r"latest names step 2, .* left: 1; write"):
        module.run(checked, Command(name="run"))
    assert not (tmp_path / "run" / "metrics.abandoned.jsonl").exists()


@pytest.fixture
def requests(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, str]]:
    """Evaluations without engines; each (step, when) of the list is a stop request `within` or `after` one."""
    requests: list[tuple[int, str]] = []

    def ask(step: int, when: str) -> None:
        if (step, when) in requests:
            requests.remove((step, when))
            write_request(tmp_path / "run", reason="time limit", requeue=True)

    def evaluate(
        config: EvalConfig, started: object, scorers: object, prompts: object, progress: Progress, *, step: int
    ) -> list[EvaluationRow]:
        machine.log.append(f"evaluate step {step}")
        progress(0, 2)
        ask(step, "within")
        progress(1, 2)
        ask(step, "after")
        progress(2, 2)
        figures = {"average": 0.5, "passed": 0.5, "truncated": 0.0, "mean_length": 5.0}
        return [
            EvaluationRow(
                **{"set_name": name, "data_source": "all", "format": "bf16", "step": step, "num_prompts": 2},
                samples_per_prompt=each.samples_per_prompt,
                settings=settings_digest(each),
                run_settings=evaluation.run_settings(config),
                **figures,
            )
            for name, each in config.sets.items()
        ]

    text = SimpleNamespace(scorers=(), actors=())
    monkeypatch.setattr(module, "evaluate_directories", evaluation.evaluate_directories)
    monkeypatch.setattr(evaluation, "_load_prompts", lambda config, running: (text, {}))
    monkeypatch.setattr(evaluation, "_begin_engines", lambda config, running: (SimpleNamespace(actors=()), []))
    monkeypatch.setattr(evaluation, "_evaluate", evaluate)
    monkeypatch.setattr(stop_request, "CHECK_EVERY_S", 0.0)
    return requests


@pytest.mark.parametrize(
    ("request_at", "written", "repeated"),
    [
        ((0, "after"), [0], [LAST]),
        ((0, "within"), [], [0, LAST]),
        ((LAST, "within"), [0], [LAST]),
    ],
)
def test_a_stop_request_ends_the_last_evaluations_and_the_next_start_evaluates_the_rest(
    start: Start,
    requests: list[tuple[int, str]],
    tmp_path: Path,
    request_at: tuple[int, str],
    written: list[int],
    repeated: list[int],
) -> None:
    requests.append(request_at)
    with pytest.raises(StopRequestedError) as stopped:
        start(sets=True)
    assert stopped.value.step == LAST and judge(stopped.value).ending.code == 75
    records = tmp_path / "run" / "evaluation.jsonl"
    assert [row["step"] for row in read_rows(records)] == written
    assert not (tmp_path / "run" / "stop.json").exists() and (tmp_path / "run" / "stopped.json").exists()
    assert start(sets=True) == [f"evaluate step {step}" for step in repeated]
    assert [row["step"] for row in read_rows(records)] == [0, LAST]
    assert start(sets=True) == []


def test_both_ends_are_evaluated_again_where_a_setting_of_all_sets_has_changed(
    start: Start, requests: list[tuple[int, str]]
) -> None:
    assert requests == []
    start(sets=True)
    assert start(sets=True) == []
    changed = ("sampling.stop_token_ids=[7]",)
    assert start(*changed, sets=True) == ["evaluate step 0", f"evaluate step {LAST}"]
    assert start(*changed, sets=True) == []


def test_a_stop_request_after_the_last_evaluation_stops_nothing(
    start: Start, requests: list[tuple[int, str]], tmp_path: Path
) -> None:
    requests.append((LAST, "after"))
    start(sets=True)
    assert [row["step"] for row in read_rows(tmp_path / "run" / "evaluation.jsonl")] == [0, LAST]


def test_a_finished_run_evaluates_sets_at_both_ends_that_have_no_rows_there_with_their_k(
    start: Start, requests: list[tuple[int, str]], tmp_path: Path
) -> None:
    def evaluated() -> list[tuple[str, int, int]]:
        rows = read_rows(tmp_path / "run" / "evaluation.jsonl")
        return [(row["set_name"], row["step"], row["samples_per_prompt"]) for row in rows]

    start(sets=True)
    first = [("a", 0, 1), ("a", LAST, 1)]
    assert evaluated() == first
    added = (f"evaluation.sets.b.path={tmp_path / 'set.jsonl'}", "evaluation.sets.b.max_response_tokens=64")
    assert start(*added, sets=True) == ["evaluate step 0", f"evaluate step {LAST}"]
    second = [*first, ("b", 0, 1), ("b", LAST, 1)]
    assert evaluated() == second
    assert start(*added, sets=True) == []
    sampled = ("evaluation.sets.a.samples_per_prompt=4", "evaluation.sets.a.temperature=1.0")
    start(*added, *sampled, sets=True)
    assert evaluated() == [*second, ("a", 0, 4), ("a", LAST, 4)]


@pytest.mark.parametrize("override", ["limit=1", "max_response_tokens=32", "path={}"])
def test_a_resume_with_other_settings_of_a_set_evaluates_the_first_weights_again(
    start: Start, requests: list[tuple[int, str]], tmp_path: Path, override: str
) -> None:
    (tmp_path / "longer.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 2)
    changed = f"evaluation.sets.a.{override.format(tmp_path / 'longer.jsonl')}"
    requests.append((0, "after"))
    with pytest.raises(StopRequestedError):
        start(sets=True)
    assert start(changed, sets=True)[-2:] == ["evaluate step 0", f"evaluate step {LAST}"]
    rows = [EvaluationRow.from_row(row) for row in read_rows(tmp_path / "run" / "evaluation.jsonl")]
    first, again, last = rows
    assert (first.step, again.step, last.step) == (0, 0, LAST)
    assert [(change.before, change.after) for change in changes(rows)] == [(again, last)]
    assert start(changed, sets=True) == []
    assert start(sets=True) == [f"evaluate step {LAST}"], "the first weights have a row of these settings"


def test_a_row_of_an_earlier_version_does_not_count_as_an_evaluation_with_the_present_settings(
    start: Start, requests: list[tuple[int, str]], tmp_path: Path
) -> None:
    start(sets=True)
    records = tmp_path / "run" / "evaluation.jsonl"
    rows = read_rows(records)
    assert all(row.pop("settings") for row in rows)
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert start(sets=True) == ["evaluate step 0", f"evaluate step {LAST}"]


def test_a_set_that_only_the_first_weights_have_rows_of_is_evaluated_at_the_end_only(
    start: Start, requests: list[tuple[int, str]], tmp_path: Path
) -> None:
    requests.append((0, "after"))
    with pytest.raises(StopRequestedError):
        start(sets=True)
    added = (f"evaluation.sets.b.path={tmp_path / 'set.jsonl'}", "evaluation.sets.b.max_response_tokens=64")
    start(*added, sets=True)
    rows = read_rows(tmp_path / "run" / "evaluation.jsonl")
    assert [(row["set_name"], row["step"]) for row in rows] == [("a", 0), ("b", 0), ("a", LAST), ("b", LAST)]


def test_a_run_whose_report_cannot_be_written_says_so_and_ends_as_usual(
    write_config: Callable[[str], Path],
    node: NodeResources,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(run_dir: Path) -> Path:
        raise ValueError("cannot convert float NaN to integer")

    monkeypatch.setattr(module, "_run", lambda *given: None)
    monkeypatch.setattr(module, "write_report", fail)
    module.run(check_run(load(RunConfig, write_config("")), [node]), Command(name="run"))
    said = capsys.readouterr().out
    assert "its report could not be written (ValueError: cannot convert float NaN to integer)" in said
    assert f"`megatron-rl report {tmp_path / 'run'}` writes it again" in said


@pytest.mark.parametrize(("num_finished", "code"), [(1, 8), (2, 5)])
def test_kills_decide_an_ending_in_their_step_and_the_next_one(
    write_config: Callable[[str], Path],
    node: NodeResources,
    monkeypatch: pytest.MonkeyPatch,
    num_finished: int,
    code: int,
) -> None:
    """An engine that the kernel killed, and that was replaced, has nothing to do with a rank that hangs days later.

    A process that nobody needed in its step, such as the text actor, is met in the next one.
    """
    kills = 3
    monkeypatch.setattr(conclusion, "memory_kills", lambda: kills)

    def go(checked: CheckedRun, directory: RunDirectory, shown: Shown, resume: ResumePoint) -> None:
        nonlocal kills
        kills += 1
        for step in range(num_finished):
            shown.status.finished(step)
        raise DeadlineError("rank(s) [17] had not returned after 7200 s")

    monkeypatch.setattr(module, "_run", go)
    command = Command(name="run", kills_before=kills)
    with pytest.raises(DeadlineError) as ended:
        module.run(check_run(load(RunConfig, write_config("")), [node]), command)
    assert conclude(ended.value, command) == code
    kills += 1
    assert conclude(ended.value, command) == 8


@pytest.mark.parametrize(("format", "in_8_bits"), [("int8", True), ("bf16", False)])
def test_the_command_knows_the_weights_of_the_engines_that_run_now(
    write_config: Callable[[str], Path],
    node: NodeResources,
    tmp_path: Path,
    machine: Machine,
    format: str,
    in_8_bits: bool,
) -> None:
    """The guard may have changed them."""
    checked = check_run(load(RunConfig, write_config(""), [f"engine.format={format}"]), [node])
    with RunDirectory(tmp_path / "run") as directory:
        shown = shown_of(directory)
        shown.command.in_8_bits = not in_8_bits
        module._run_engines(checked, directory, shown, resume_point(directory), ())
    assert shown.command.in_8_bits is in_8_bits
