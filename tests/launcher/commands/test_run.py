"""The last weights of a run: exported once, and again where an earlier start could not, or left those of another step.

Ray, engines and trainer are stand-ins; the run directory is real.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.checks.check import CheckedRun, check_run
from launcher.cluster.node import NodeResources
from launcher.commands import assembly
from launcher.commands import run as module
from launcher.commands.assembly import Shown
from launcher.commands.resume_point import ResumePoint, resume_point
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import RunDirectoryError
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.exported import replace_policy
from launcher.run_dir.status import StatusFile
from megatron_rl.algorithm.guard import Action
from megatron_rl.ranks import TrainerRank
from megatron_rl.trainer.messages import TrainerSpec
from rollout.data.order import OrderState

LAST = 3


class Machine:
    """Stands for Ray, and for the trainer that it starts; `log` has what they were asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fault: Exception | None = None
        """Of the next export."""
        self.weights = ""
        self.ranks = SimpleNamespace(kill_and_wait=lambda: self.log.append("end"))

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
        self, config: RunConfig, models: Mapping[int, str], running: "Machine", progress: RunProgress
    ) -> list[object]:
        for step, model in models.items():
            if step:
                self.log.append(f"evaluate {(Path(model) / 'model.safetensors').read_text()} as step {step}")
        return []


def save(directory: RunDirectory, step: int) -> None:
    folder = directory.begin_checkpoint(step)
    (folder / "trainer").mkdir()
    (folder / "state.json").write_text(json.dumps({"prompt_order": OrderState(fingerprint="").to_json()}))
    directory.finish_checkpoint(step, 2)


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
            shown = Shown(progress=RunProgress(LAST), status=StatusFile(run_dir=directory.path, num_steps=LAST))
            machine.log.clear()
            module._run_engines(checked, directory, shown, resume_point(directory), ())
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
        directory.append_metrics(0, {"a": 1.0})
    with pytest.raises(RunDirectoryError, match="seed: 99 -> "):
        module.run(checked)
    assert not (tmp_path / "run" / "metrics.abandoned.jsonl").exists()


def test_a_run_whose_newest_checkpoint_is_gone_is_refused_and_keeps_its_records(
    write_config: Callable[[str], Path], node: NodeResources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = check_run(load(RunConfig, write_config("")), [node])
    monkeypatch.setattr(module, "_run", lambda *given: pytest.fail("the run has begun"))
    with RunDirectory(tmp_path / "run") as directory:
        save(directory, 1)
        save(directory, 2)
        directory.append_metrics(0, {"a": 1.0})
    (tmp_path / "run" / "checkpoints" / "2").rename(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match=r"latest names step 2, .* left: 1; write"):
        module.run(checked)
    assert not (tmp_path / "run" / "metrics.abandoned.jsonl").exists()
