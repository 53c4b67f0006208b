"""A checkpoint is the newest only when it is whole; a save waits for the one before it; faults keep the one before."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from launcher.run_dir import saves as module
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.saves import Saves, read_state
from megatron_rl.algorithm.guard import GuardState
from megatron_rl.config import CheckpointConfig
from rollout.failures import CallError, Place


class Trainer:
    """Ranks whose files are written when the test says so."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_written = False
        self.fault: Exception | None = None

    def begin_save(self, path: str, *, background: bool) -> None:
        Path(path).mkdir()
        self.log.append(f"begin {Path(path).parent.name} {'behind' if background else 'first'}")

    def save_is_written(self, *, wait_s: float) -> bool:
        self.log.append("look")
        return self.is_written

    def finish_save(self) -> float:
        if self.fault is not None:
            raise self.fault
        self.log.append("finish")
        return 12.0


class Lengths:
    def save(self, path: Path) -> None:
        np.savez(path, lengths=np.zeros(1))


class Order:
    def to_json(self) -> dict[str, int]:
        return {"epoch": 3}


class Planner:
    lengths = Lengths()

    def state(self) -> Order:
        return Order()


class History:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def save(self, folder: Path) -> None:
        folder.mkdir()
        self.log.append(f"history {folder.parent.name}")

    def saved(self, folder: Path) -> None:
        assert folder.is_dir()
        self.log.append(f"saved {folder.parent.name}")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory(tmp_path / "run") as found:
        yield found


def saves_of(directory: RunDirectory, log: list[str], *, background: bool = True, keep_last_samples: int = 0) -> Saves:
    config = CheckpointConfig(keep_last=2, background=background, keep_last_samples=keep_last_samples)
    return Saves(directory, config, history=History(log))


def newest(directory: RunDirectory) -> int | None:
    found = directory.latest_checkpoint()
    return None if found is None else found[0]


def test_a_checkpoint_is_the_newest_when_all_ranks_have_written_and_not_before(directory: RunDirectory) -> None:
    log: list[str] = []
    saves, trainer = saves_of(directory, log), Trainer(log)
    guard = GuardState(level=2, hold=4, layers=(3, 0))
    saves.begin(1, trainer, Planner(), guard)
    saves.finish_if_written(is_step=True)
    assert newest(directory) is None and saves.is_under_way
    trainer.is_written = True
    saves.finish_if_written(is_step=True)
    assert newest(directory) == 1 and not saves.is_under_way
    assert log == ["begin 1.partial behind", "history 1.partial", "look", "look", "finish", "saved 1"]
    folder = directory.path / "checkpoints" / "1"
    state = read_state(folder)
    of_guard = state.pop("guard")
    assert isinstance(of_guard, dict) and GuardState.from_json(of_guard) == guard
    assert state == {"finished_steps": 1, "prompt_order": {"epoch": 3}}
    assert {child.name for child in folder.iterdir()} == {"trainer", "history", "state.json", "lengths.npz"}


def test_a_rollout_looks_now_and_then(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    saves, trainer, now = saves_of(directory, log), Trainer(log), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    saves.begin(1, trainer, Planner(), GuardState())
    for now[0] in (100.1, 100.9, 101.2, 101.3):
        saves.finish_if_written(is_step=False)
    assert log.count("look") == 2


def test_a_save_waits_for_the_one_before_it_and_the_wait_is_counted(directory: RunDirectory) -> None:
    log: list[str] = []
    saves, trainer = saves_of(directory, log), Trainer(log)
    saves.begin(1, trainer, Planner(), GuardState())
    assert saves.metrics() == {"checkpoint/waits": 0.0}
    saves.begin(2, trainer, Planner(), GuardState())
    assert newest(directory) == 1
    assert [entry for entry in log if entry.startswith(("begin", "finish"))] == [
        "begin 1.partial behind",
        "finish",
        "begin 2.partial behind",
    ]
    metrics = saves.metrics()
    assert (metrics["checkpoint/waits"], metrics["checkpoint/save_s"]) == (1.0, 12.0)
    assert saves.metrics() == {"checkpoint/waits": 1.0}


@pytest.mark.parametrize(("keep_last_samples", "kept"), [(0, {0, 1, 2, 3, 4}), (2, {0, 2, 3, 4}), (9, {0, 1, 2, 3, 4})])
def test_older_samples_and_traces_are_removed_with_a_checkpoint(
    directory: RunDirectory, keep_last_samples: int, kept: set[int]
) -> None:
    """A checkpoint of four steps; the fifth step has begun to write."""
    paths = [(directory.samples_path(step), directory.traces_path(step)) for step in range(5)]
    forwards = directory.path / "traces" / "engine-0.forwards"
    for path in [*(path for both in paths for path in both), forwards]:
        path.write_text("")
    saves = saves_of(directory, [], keep_last_samples=keep_last_samples)
    saves.begin(4, Trainer([]), Planner(), GuardState())
    assert all(path.exists() for both in paths for path in both)
    saves.finish()
    for place in (0, 1):
        assert {step for step, both in enumerate(paths) if both[place].exists()} == kept
    assert forwards.exists()


def test_the_span_of_a_save_lasts_to_its_last_file(directory: RunDirectory) -> None:
    saves = saves_of(directory, [])
    saves.begin(1, Trainer([]), Planner(), GuardState())
    saves.finish()
    (span,) = map(json.loads, (directory.path / "events.jsonl").read_text().splitlines())
    assert (span["actor"], span["activity"]) == ("checkpoint writer", "write")
    assert span["end_s"] - span["start_s"] == pytest.approx(12.0)


def test_a_save_that_fails_raises_once_and_leaves_the_one_before(directory: RunDirectory) -> None:
    saves, trainer = saves_of(directory, []), Trainer([])
    saves.begin(1, trainer, Planner(), GuardState())
    saves.finish()
    saves.begin(2, trainer, Planner(), GuardState())
    trainer.is_written, trainer.fault = True, CallError("no space", Place(role="trainer", ranks=(1,)))
    with pytest.raises(CallError, match="no space"):
        saves.finish_if_written(is_step=True)
    assert newest(directory) == 1
    saves.finish()  # nothing is left to wait for


def test_a_save_whose_trainer_is_lost_is_given_up(directory: RunDirectory) -> None:
    log: list[str] = []
    saves = saves_of(directory, log)
    saves.begin(1, Trainer(log), Planner(), GuardState())
    saves.forget()
    saves.finish()
    assert newest(directory) is None and "finish" not in log
    saves.begin(1, Trainer(log), Planner(), GuardState())
    saves.finish()
    assert newest(directory) == 1 and not list((directory.path / "checkpoints").glob("*.partial"))


def test_without_background_the_checkpoint_is_the_newest_at_once(directory: RunDirectory) -> None:
    log: list[str] = []
    saves_of(directory, log, background=False).begin(4, Trainer(log), Planner(), GuardState())
    assert log == ["begin 4.partial first", "history 4.partial", "finish", "saved 4"]
    assert newest(directory) == 4
