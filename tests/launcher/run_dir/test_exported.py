"""The exported weights of a run and the mark of their step, which are replaced together."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.run_dir import exported
from launcher.run_dir.exported import (
    MARK,
    POLICY,
    exported_step,
    forget_policy,
    mark,
    remove_unfinished_export,
    replace_policy,
)


def write(text: str):
    def export(path: str) -> None:
        Path(path).mkdir()
        (Path(path) / "weights").write_text(text)

    return export


def test_the_mark_is_there_with_the_weights_and_a_failed_export_leaves_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / POLICY
    assert exported_step(target) is None
    (tmp_path / f"{POLICY}.partial").mkdir()  # of a start that was killed
    replace_policy(tmp_path, 2, write("two"))
    assert (exported_step(target), (target / "weights").read_text()) == (2, "two")
    with pytest.raises(OSError, match="no space"):
        replace_policy(tmp_path, 3, fail)
    assert (exported_step(target), (target / "weights").read_text()) == (2, "two")
    replace_policy(tmp_path, 3, write("three"))
    assert (exported_step(target), (target / "weights").read_text()) == (3, "three")
    assert [path.name for path in tmp_path.iterdir()] == [POLICY]


def fill_the_disk(path: str) -> None:
    """As the trainer's writer does, which renames its folder when it is whole."""
    inner = Path(f"{path}.partial")
    inner.mkdir()
    (inner / "weights").write_text("half")
    raise OSError("no space left on device")


@pytest.mark.parametrize("export", [write("whole, but the mark is not written"), fill_the_disk])
def test_an_export_that_fails_keeps_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Callable[[str], None]
) -> None:
    def full(path: Path, step: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(exported, "mark", full)
    with pytest.raises(OSError, match="no space"):
        replace_policy(tmp_path, 3, export)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_removed_and_a_whole_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / POLICY
    remove_unfinished_export(tmp_path)
    replace_policy(tmp_path, 2, write("old"))
    for folder in (f"{POLICY}.partial", f"{POLICY}.partial.partial"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "weights").write_text("half")
    remove_unfinished_export(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [POLICY] and (target / "weights").read_text() == "old"
    stop_next_rename_to(POLICY, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        replace_policy(tmp_path, 3, write("new"))
    assert not target.exists()
    remove_unfinished_export(tmp_path)
    assert (exported_step(target), (target / "weights").read_text()) == (3, "new")
    assert [path.name for path in tmp_path.iterdir()] == [POLICY]


def test_nothing_is_removed_beside_the_folder_that_a_link_leads_to(tmp_path: Path) -> None:
    """Another run may export there now."""
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere" / "weights.partial").mkdir(parents=True)
    (tmp_path / "run" / POLICY).symlink_to(tmp_path / "elsewhere" / "weights")
    remove_unfinished_export(tmp_path / "run")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["weights.partial"]


def test_an_export_is_whole_if_its_start_is_killed_while_it_removes_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, remove = tmp_path / POLICY, shutil.rmtree
    replace_policy(tmp_path, 2, write("old"))

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if (path / "weights").exists() and (path / "weights").read_text() == "old":
            (path / "weights").unlink()
            raise KeyboardInterrupt
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_policy(tmp_path, 3, write("new"))
    assert (exported_step(target), (target / "weights").read_text()) == (3, "new")
    monkeypatch.setattr(shutil, "rmtree", remove)
    replace_policy(tmp_path, 4, write("newer"))
    assert (exported_step(target), (target / "weights").read_text()) == (4, "newer")
    assert [path.name for path in tmp_path.iterdir()] == [POLICY]


def stop_next_rename_to(name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rename to `name` raises `error` and does nothing."""
    rename, left = Path.rename, [error]

    def stopped(path: Path, target: Path) -> Path:
        if Path(target).name == name and left:
            raise left.pop()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stopped)


def fail(path: str) -> None:
    Path(path).mkdir()
    raise OSError("no space left on device")


def test_an_interruption_between_the_renames_leaves_the_new_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / POLICY, Path.rename
    replace_policy(tmp_path, 2, write("old"))

    def interrupted(path: Path, new: Path) -> Path:
        renamed = rename(path, new)
        if path == target:
            raise KeyboardInterrupt
        return renamed

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_policy(tmp_path, 3, write("new"))
    assert (exported_step(target), (target / "weights").read_text()) == (3, "new")
    assert [path.name for path in tmp_path.iterdir()] == [POLICY]


def test_a_replacement_killed_between_the_renames_is_finished_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / POLICY
    replace_policy(tmp_path, 2, write("old"))
    stop_next_rename_to(POLICY, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        replace_policy(tmp_path, 3, write("new"))
    assert not target.exists()
    with pytest.raises(OSError, match="no space"):
        replace_policy(tmp_path, 4, fail)
    assert (exported_step(target), (target / "weights").read_text()) == (3, "new")
    stop_next_rename_to(POLICY, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        replace_policy(tmp_path, 5, write("later"))
    forget_policy(tmp_path, 4)
    assert exported_step(target) is None and (target / "weights").read_text() == "later"
    assert {path.name for path in tmp_path.iterdir()} == {POLICY}


def test_the_earlier_export_returns_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / POLICY
    replace_policy(tmp_path, 2, write("old"))
    stop_next_rename_to(POLICY, OSError("stale file handle"), monkeypatch)
    with pytest.raises(OSError, match="stale file handle"):
        replace_policy(tmp_path, 3, write("new"))
    assert (exported_step(target), (target / "weights").read_text()) == (2, "old")
    replace_policy(tmp_path, 3, write("new"))
    assert (exported_step(target), (target / "weights").read_text()) == (3, "new")


def test_what_is_left_of_an_earlier_export_never_takes_the_place_of_a_removed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, remove = tmp_path / POLICY, shutil.rmtree
    replace_policy(tmp_path, 2, write("old"))
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)  # files are open elsewhere
    replace_policy(tmp_path, 3, write("new"))
    monkeypatch.setattr(shutil, "rmtree", remove)
    remove(target)
    forget_policy(tmp_path, 3)
    assert not list(tmp_path.iterdir())


def test_all_of_an_export_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    replace_policy(tmp_path, 3, write("three"))
    named = events.index("rename")
    assert {"weights", MARK, f"{POLICY}.partial"} <= set(events[:named])
    assert events[named + 1 :] == [tmp_path.name]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"step": "3"}', '{"step": true}', "\x00"])
def test_a_mark_that_names_no_step_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MARK).write_text(text)
    assert exported_step(tmp_path) is None


def test_steps_that_are_taken_again_make_an_export_unknown_and_keep_it(tmp_path: Path) -> None:
    target = tmp_path / POLICY
    forget_policy(tmp_path, 0)
    replace_policy(tmp_path, 3, write("three"))
    forget_policy(tmp_path, 3)
    assert exported_step(target) == 3
    forget_policy(tmp_path, 2)
    assert exported_step(target) is None and (target / "weights").read_text() == "three"
    mark(target, 5)
    assert exported_step(target) == 5


def test_a_model_made_of_an_export_does_not_inherit_its_mark() -> None:
    """An export copies files of some suffixes from the directory of its model (`megatron_rl.weights.hf_export`)."""
    assert not Path(MARK).suffix


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere" / "weights").mkdir(parents=True)
    (tmp_path / "run" / POLICY).symlink_to(tmp_path / "elsewhere" / "weights")
    for step in (1, 2, 3):
        replace_policy(tmp_path / "run", step, lambda path: Path(path).mkdir())
        assert (tmp_path / "run" / POLICY).is_symlink()
        assert exported_step(tmp_path / "run" / POLICY) == exported_step(tmp_path / "elsewhere" / "weights") == step
    assert [each.name for each in (tmp_path / "elsewhere").iterdir()] == ["weights"]


def test_a_folder_that_was_moved_aside_and_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_policy(tmp_path, 1, lambda path: Path(path).mkdir())
    monkeypatch.setattr(exported.shutil, "rmtree", lambda path, ignore_errors: None)
    replace_policy(tmp_path, 2, lambda path: Path(path).mkdir())
    with pytest.raises(
        FileExistsError, match=r"left of an earlier replacement: remove it: .*/\.earlier\.policy\.partial"
    ):
        replace_policy(tmp_path, 3, lambda path: Path(path).mkdir())
    assert exported_step(tmp_path / POLICY) == 2
