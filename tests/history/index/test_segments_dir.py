"""A reader takes only a folder of its own user, and a sweep removes no other."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from history.index import segments_dir
from history.index.segments_dir import claim, sweep_segments
from history.own_files import PlantedError
from history.types import folder_of_node


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /dev/shm."""
    monkeypatch.setattr(segments_dir, "SHM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def test_a_link_to_a_folder_with_a_lock_is_neither_claimed_nor_swept(shared: Path, tmp_path: Path) -> None:
    """A run directory, too, has a file LOCK."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "LOCK").touch()
    (tmp_path / "run" / "config.yaml").touch()
    planted = shared / "mrl-history-x-1"
    planted.symlink_to(tmp_path / "run")
    assert sweep_segments() == []
    with pytest.raises(PlantedError):
        claim(planted)
    assert planted.is_symlink() and sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "LOCK",
        "config.yaml",
    ]


def test_a_folder_of_another_user_is_neither_claimed_nor_swept(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = shared / "mrl-history-x-1"
    os.close(claim(planted))
    if os.geteuid() == 0:
        os.chown(planted, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert sweep_segments() == []
    with pytest.raises(PlantedError):
        claim(planted)
    monkeypatch.undo()
    assert (planted / "LOCK").exists()


def test_an_own_folder_is_claimed_and_swept(shared: Path) -> None:
    folder = shared / "mrl-history-x-1"
    held = claim(folder)
    assert sweep_segments() == []
    os.close(held)
    assert sweep_segments() == [folder] and not folder.exists()


def test_each_node_of_a_host_has_a_folder_of_its_own(shared: Path) -> None:
    """A second reader of one folder would wait for the end of the first one."""
    folders = [Path(folder_of_node(str(shared / "mrl-history-x-1"), node * 56)) for node in "ab"]
    held = [claim(folder) for folder in folders]
    assert len({str(folder) for folder in folders}) == 2 and sweep_segments() == []
    for descriptor in held:
        os.close(descriptor)
    assert sweep_segments() == folders


def test_a_folder_that_is_swept_while_its_reader_begins_is_made_again(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, swept, flock = shared / "mrl-history-x-1", [], fcntl.flock

    def flock_late(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(folder)
            shutil.rmtree(folder)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    held = claim(folder)
    assert swept and os.path.samestat(os.fstat(held), (folder / "LOCK").stat())
    os.close(held)
