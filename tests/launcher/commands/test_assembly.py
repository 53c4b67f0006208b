"""The order in which a run is assembled, and what it keeps over its trainers; parts are stand-ins."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.commands import assembly
from launcher.commands.assembly import Shown, _Attempt
from launcher.commands.resume_point import ResumePoint
from launcher.commands.startup import Workers
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.endings.conclusion import Command
from launcher.errors import ConfigError
from launcher.run_dir.console import RunProgress
from launcher.run_dir.status import StatusFile
from megatron_rl.controller.controller import Repeated
from rollout.failures import Place, ProcessLostError

TOTALS = {"engine/reissued_groups": 1.0}


class Anything:
    """Stands for a part that only has to be there."""

    def __getattr__(self, name: str) -> "Anything":
        return self

    def __call__(self, *given: object, **named: object) -> "Anything":
        return self


Start = Callable[[], None]


@pytest.fixture
def execute(
    write_config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[SimpleNamespace, Start], None]:
    """Executes a run with a tracker and workers of the test."""
    config = load(RunConfig, write_config(""))
    status = StatusFile(run_dir=tmp_path, num_steps=3)
    shown = Shown(progress=RunProgress(3), status=status, command=Command(name="run"))

    def execute(tracker: SimpleNamespace, start: Start) -> None:
        monkeypatch.setattr(assembly, "read_inputs", lambda *given: None)
        monkeypatch.setattr(assembly, "Tracker", tracker)
        monkeypatch.setattr(assembly, "start_workers", lambda *given: start())
        checked, directory = SimpleNamespace(config=config), SimpleNamespace(path=tmp_path)
        assembly.execute(checked, directory, shown, None, ResumePoint(first_step=2), ())

    return execute


def test_wandb_begins_before_the_engines_and_ends_if_they_cannot_start(
    execute: Callable[[SimpleNamespace, Start], None],
) -> None:
    log: list[str] = []
    run = SimpleNamespace(finish=lambda: log.append("wandb ends"))

    def begin(*given: object, **named: object) -> SimpleNamespace:
        log.append(f"wandb begins at step {named['first_step']}")
        return run

    def die() -> None:
        log.append("engines start")
        raise ProcessLostError("gone", Place(role="engine", ranks=(0,)))

    with pytest.raises(ProcessLostError):
        execute(SimpleNamespace(start=begin), die)
    assert log == ["wandb begins at step 2", "engines start", "wandb ends"]


def test_a_key_that_the_server_refuses_starts_no_engine(execute: Callable[[SimpleNamespace, Start], None]) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise ConfigError("the key is wrong")

    with pytest.raises(ConfigError, match="the key is wrong"):
        execute(SimpleNamespace(start=refuse), lambda: pytest.fail("engines have started"))


def test_limits_of_restarts_follow_the_newest_finished_step(
    write_config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that returns to a checkpoint lowers the step of the run, but not the one that limits count by."""
    config = load(RunConfig, write_config("engine: {max_restarts: 5}\ntrainer: {max_restarts: 4}\n"))
    placement = SimpleNamespace(engines=(), trainers=(), nodes=())
    checked = SimpleNamespace(config=config, placement=placement)
    status = StatusFile(run_dir=tmp_path, num_steps=900, step=2)
    taken: list[assembly._Parts] = []
    for name in ("read_inputs", "start_workers", "note_begin", "_history_client", "_recorder", "_end", "Tracker"):
        monkeypatch.setattr(assembly, name, Anything())
    monkeypatch.setattr(assembly, "_take_steps", lambda parts, *given: taken.append(parts))
    shown = Shown(progress=RunProgress(900), status=status, command=Command(name="run"))
    assembly.execute(checked, SimpleNamespace(path=tmp_path), shown, None, ResumePoint(first_step=2), ())
    limits = (taken[0].lost_engines.limit, taken[0].restarts.limit)
    assert [limit.max_restarts for limit in limits] == [5, 4]
    assert [limit.newest_step() for limit in limits] == [2, 2]
    status.finished(700)
    status.step = 600
    status.finished(600)
    assert [limit.newest_step() for limit in limits] == [701, 701]


@pytest.fixture
def parts() -> SimpleNamespace:
    """Of a run that has lost its trainer."""
    restarts = SimpleNamespace(clear=lambda *given: None, count=lambda num_steps: None, totals={}, repeated=Repeated())
    others = ("checked", "directory", "shown", "running", "inputs", "history", "recorder", "lost_engines", "placed")
    return SimpleNamespace(restarts=restarts, **{name: Anything() for name in others})


def lost(controller: SimpleNamespace | None) -> _Attempt:
    return _Attempt(
        workers=Workers(run_id="run", specs=[], engines=Anything(), trainer=Anything()),
        sharing=None,
        controller=controller,
    )


def test_totals_go_on_with_another_trainer_also_if_one_is_lost_before_its_first_step(
    parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "resume_point", lambda directory: ResumePoint(first_step=1))
    monkeypatch.setattr(assembly, "start_trainer", lambda *given: Anything())
    monkeypatch.setattr(assembly, "device_sharing", lambda *given: None)
    failure = ProcessLostError("gone", Place(role="trainer", ranks=(1,)))
    first = lost(SimpleNamespace(pool=None, totals=lambda: TOTALS))
    second, resume = assembly._start_again(parts, first, failure)
    assert second.controller is None and parts.restarts.totals == TOTALS
    assembly._start_again(parts, second, failure)
    assert parts.restarts.totals == TOTALS
    stand_ins = (
        *("publish_plan", "build_delivery", "_planner", "build_publisher", "EngineRestarter", "PhaseClock"),
        *("EngineRevival", "_pool", "Phases", "train_phase_policy", "Evaluator", "loop_settings", "StopWatch"),
        *("evaluation_of", "run_settings"),
    )
    for name in stand_ins:
        monkeypatch.setattr(assembly, name, Anything())
    monkeypatch.setattr(assembly, "_guard", lambda *given: None)
    monkeypatch.setattr(assembly, "Controller", lambda **given: given)
    assert assembly._with_controller(parts, second, resume).controller["earlier"] == TOTALS
