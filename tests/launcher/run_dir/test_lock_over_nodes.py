"""A file system whose locks hold on one node only: the lock of another node's process is free here."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launcher.errors import RunInUseError
from launcher.run_dir import run_lock as module
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.run_lock import RunLock
from launcher.run_dir.status import StatusFile


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.2)
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    mount(monkeypatch, "nfs4", "rw,vers=4.2,local_lock=all")


def mount(monkeypatch: pytest.MonkeyPatch, fstype: str, options: str) -> None:
    """From now on everything lies in such a file system."""
    found = [SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw")]
    found += [SimpleNamespace(mountpoint="/", fstype=fstype, opts=options)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDirectory, StatusFile]:
    """A run on node1; from now on this is node2, whose kernel knows nothing of node1's locks."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    run = RunDirectory(tmp_path)
    status = StatusFile(run_dir=tmp_path, num_steps=9)
    status.phase("engines", "rollout")
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    monkeypatch.setattr(fcntl, "flock", lambda *given: None)
    return run, status


def test_a_run_that_lives_on_another_node_is_refused_and_keeps_its_save(
    tmp_path: Path, held: tuple[RunDirectory, StatusFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, status = held
    folder, text = run.begin_checkpoint(1), (tmp_path / "LOCK").read_text()
    sleep = time.sleep

    def live(seconds: float) -> None:
        sleep(seconds)
        status.alive()

    monkeypatch.setattr(time, "sleep", live)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(RunInUseError, match=r"in use by process \d+ on node1: .*`local_lock`.*not `-o localflock`"):
        RunDirectory(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert folder.is_dir() and (tmp_path / "LOCK").read_text() == text


def test_a_run_that_was_killed_on_another_node_restarts_after_a_short_wait(
    tmp_path: Path, held: tuple[RunDirectory, StatusFile]
) -> None:
    begun_s = time.monotonic()
    RunDirectory(tmp_path)
    assert time.monotonic() - begun_s >= 0.2
    assert json.loads((tmp_path / "LOCK").read_text())["host"] == "node2"


def test_nobody_waits_for_a_holder_that_has_ended_or_is_long_silent(
    tmp_path: Path, held: tuple[RunDirectory, StatusFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    _, status = held
    silent_s = time.time() - module.YOUNG_S - 1
    record = json.loads((tmp_path / "status.json").read_text()) | {"alive_s": silent_s, "written_s": silent_s}
    (tmp_path / "status.json").write_text(json.dumps(record))
    os.utime(tmp_path / "LOCK", (silent_s, silent_s))
    RunLock(tmp_path / "LOCK").release()
    status.alive()
    assert (tmp_path / "LOCK").read_text() == "", "an orderly end"
    RunLock(tmp_path / "LOCK").release()


@pytest.mark.parametrize(
    ("fstype", "options", "reach"),
    [
        ("nfs4", "rw,vers=4.2,local_lock=none", True),
        ("nfs", "rw,nolock", False),
        ("nfs", "rw,local_lock=flock", False),
        ("lustre", "rw,flock,lazystatfs", True),
        ("lustre", "rw,localflock", False),
        ("lustre", "rw", False),
        ("gpfs", "rw", True),
        ("beegfs", "rw", False),
        ("fuse.sshfs", "rw", False),
        ("overlay", "rw", True),
    ],
)
def test_nobody_waits_where_locks_hold_on_all_nodes(
    tmp_path: Path,
    held: tuple[RunDirectory, StatusFile],
    monkeypatch: pytest.MonkeyPatch,
    fstype: str,
    options: str,
    reach: bool,
) -> None:
    mount(monkeypatch, fstype, options)
    looks = []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: looks.append(seconds) or time_passes())
    RunLock(tmp_path / "LOCK").release()
    assert bool(looks) is not reach


def time_passes(seconds: float = 0.05) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


def test_the_nearest_mount_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared" / "run").mkdir(parents=True)
    mounts = {"/": "ext4", str(tmp_path / "shared"): "beegfs", str(tmp_path): "xfs", str(tmp_path / "share"): "ext4"}
    found = [SimpleNamespace(mountpoint=point, fstype=fstype, opts="rw") for point, fstype in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    assert not module.locks_reach_all_nodes(tmp_path / "shared" / "run")
    assert module.locks_reach_all_nodes(tmp_path)
    found.clear()
    assert not module.locks_reach_all_nodes(tmp_path)


@pytest.mark.parametrize("text", ["", "7", "{}", "[]", '{"pid": 3}', "\x00"])
def test_a_lock_whose_text_names_nobody_is_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "LOCK").write_text(text)
    RunLock(tmp_path / "LOCK").release()
