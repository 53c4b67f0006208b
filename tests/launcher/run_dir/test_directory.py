import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import read_rows, replace_rows
from launcher.run_dir.checkpoints import Checkpoints
from launcher.run_dir.directory import RunDirectory
from tests.support.deadline import DEADLINE_S

HOLD = (
    "import sys, time\n"
    "from launcher.run_dir.directory import RunDirectory\n"
    "held = RunDirectory(sys.argv[1])\n"
    "held.append_metrics(0, {'reward/mean': 0.5}, ended_s=1.0)\n"
    "print('held', flush=True)\n"
    "time.sleep(600)\n"
)


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_naming_the_process_and_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    process = holder(tmp_path / "run")
    try:
        with pytest.raises(RunDirectoryError, match=rf"in use by process {process.pid} on "):
            RunDirectory(tmp_path / "run")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with RunDirectory(tmp_path / "run") as run:
        assert [row["step"] for row in run.metrics()] == [0]
        assert json.loads((tmp_path / "run" / "LOCK").read_text())["pid"] == os.getpid()


def test_a_closed_directory_can_be_opened_again(tmp_path: Path) -> None:
    RunDirectory(tmp_path).close()
    with RunDirectory(tmp_path), pytest.raises(RunDirectoryError):
        RunDirectory(tmp_path)


def test_a_planted_link_is_refused_before_anything_is_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")  # the run directory may be a link, and its folders too
    (tmp_path / "big").mkdir()
    (tmp_path / "scratch" / "checkpoints").symlink_to(tmp_path / "big")
    RunDirectory(tmp_path / "run").close()
    planted = tmp_path / "scratch" / "status.json.partial"
    planted.symlink_to(tmp_path / "bashrc")
    (tmp_path / "scratch" / "LOCK").unlink()
    if os.geteuid() == 0:
        os.chown(planted, 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RunDirectoryError, match=r"`run_dir` = .*/run: .* is a link that .* made; a run follows only"):
        RunDirectory(tmp_path / "run")
    assert not (tmp_path / "bashrc").exists() and not (tmp_path / "scratch" / "LOCK").exists()


def test_children_do_not_keep_the_lock_alive(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        run.close()
        RunDirectory(tmp_path).close()
    finally:
        child.communicate(b"\n")


def test_rows_of_repeated_steps_are_moved_to_another_file_and_none_is_lost(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        for step in range(5):
            run.append_metrics(step, {"reward/mean": step / 10}, ended_s=step)
        run.append_evaluation([{"step": 0, "average": 0.1}, {"step": 3, "average": 0.2}, {"step": 5, "average": 0.3}])
        assert run.resume_at(3) == 3
        run.append_metrics(3, {"reward/mean": 9.0}, ended_s=3.0)
        assert [(row["step"], row["reward/mean"]) for row in run.metrics()] == [(0, 0), (1, 0.1), (2, 0.2), (3, 9.0)]
        assert [row["step"] for row in run.evaluation()] == [0, 3]
        abandoned = [json.loads(line) for line in (tmp_path / "metrics.abandoned.jsonl").read_text().splitlines()]
        assert [row["step"] for row in abandoned] == [3, 4]
        assert run.resume_at(4) == 0


def test_a_start_without_checkpoint_also_moves_the_initial_evaluation(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {"a": 1.0}, ended_s=1.0)
        run.append_evaluation([{"step": 0, "average": 0.1}])
        assert run.resume_at(0) == 2
        assert (run.metrics(), run.evaluation()) == ([], [])


def test_an_incomplete_last_line_is_dropped_before_the_next_append(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {"a": 1.0}, ended_s=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "time')
    with RunDirectory(tmp_path) as run:
        run.append_metrics(1, {"a": 2.0}, ended_s=2.0)
        assert [row["a"] for row in run.metrics()] == [1.0, 2.0]


def test_a_span_is_recorded_even_when_its_body_raises(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        with pytest.raises(KeyError), run.span("trainer-0", "train"):
            raise KeyError
        row = json.loads((tmp_path / "events.jsonl").read_text())
    assert (row["actor"], row["activity"]) == ("trainer-0", "train")
    assert row["start_s"] <= row["end_s"]


def test_a_checkpoint_becomes_latest_only_when_it_is_complete(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        assert run.latest_checkpoint() is None
        (run.begin_checkpoint(2) / "state.json").write_text("2")
        assert run.latest_checkpoint() is None
        run.finish_checkpoint(2, keep_last=2)
        (run.begin_checkpoint(4) / "state.json").write_text("half")
    with RunDirectory(tmp_path) as run:
        assert run.latest_checkpoint() == (2, tmp_path / "checkpoints" / "2")
        assert list(run.begin_checkpoint(4).iterdir()) == []


def test_all_of_a_checkpoint_and_the_records_before_it_are_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power keeps what was synced, and the renames that were synced after it."""
    events: list[tuple[str, str]] = []
    sync, rename, replace = os.fsync, Path.rename, Path.replace

    def name(path: str | Path) -> str:
        return Path(path).relative_to(tmp_path).as_posix()

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        events.append(("sync", name(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(("rename", name(path)))
        return rename(path, target)

    def noted_replace(path: Path, target: Path) -> Path:
        events.append(("rename", name(path)))
        return replace(path, target)

    with RunDirectory(tmp_path) as run:
        for step in range(2):
            run.append_metrics(step, {"a": 1.0}, ended_s=step)
            for path in (run.samples_path(step), run.traces_path(step)):
                path.write_text("{}\n")
        partial = run.begin_checkpoint(2)
        (partial / "trainer" / "0").mkdir(parents=True)
        for file in ("state.json", "trainer/0/weights"):
            (partial / file).write_text("2")
        monkeypatch.setattr(os, "fsync", noted_sync)
        monkeypatch.setattr(Path, "rename", noted_rename)
        monkeypatch.setattr(Path, "replace", noted_replace)
        run.finish_checkpoint(2, keep_last=2)
    named, latest = (events.index(("rename", f"checkpoints/{path}")) for path in ("2.partial", "latest.partial"))
    records = {f"{folder}/step-{step}.jsonl" for folder in ("samples", "traces") for step in range(2)}
    whole = {"state.json", "trainer", "trainer/0", "trainer/0/weights"}
    wanted = {".", "metrics.jsonl", "samples", "traces", *records}
    wanted |= {"checkpoints/2.partial", *(f"checkpoints/2.partial/{path}" for path in whole)}
    assert wanted - {path for _, path in events[:named]} == set()
    assert events[named:][:3] == [
        ("rename", "checkpoints/2.partial"),
        ("sync", "checkpoints"),
        ("sync", "checkpoints/latest.partial"),
    ]
    assert events[latest + 1] == ("sync", "checkpoints")


def test_older_checkpoints_are_removed_once_a_newer_one_is_complete(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        for step in (1, 2, 3, 3):
            (run.begin_checkpoint(step) / "state.json").write_text(str(step))
            run.finish_checkpoint(step, keep_last=2)
        assert run.latest_checkpoint() == (3, tmp_path / "checkpoints" / "3")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3", "latest"]


def test_checkpoints_of_an_abandoned_trajectory_do_not_count_as_kept_ones(tmp_path: Path) -> None:
    """After a return to step 2 by hand, 6 and 8 are newer by number only."""
    with RunDirectory(tmp_path) as run:
        for step in (2, 6, 8):
            (run.begin_checkpoint(step) / "state.json").write_text(str(step))
            run.finish_checkpoint(step, keep_last=9)
        for step in (3, 4):
            (run.begin_checkpoint(step) / "state.json").write_text(str(step))
            run.finish_checkpoint(step, keep_last=2)
        assert run.latest_checkpoint() == (4, tmp_path / "checkpoints" / "4")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4", "6", "8", "latest"]


def test_checkpoints_of_an_abandoned_trajectory_push_out_none_of_the_one_that_goes_on(tmp_path: Path) -> None:
    """A stop request saves at any step, so the numbers of two trajectories differ."""
    folder = tmp_path / "checkpoints"

    def save(run: RunDirectory, *steps: int) -> list[str]:
        for step in steps:
            (run.begin_checkpoint(step) / "state.json").write_text(str(step))
            run.finish_checkpoint(step, keep_last=2)
        run.close()
        return sorted(path.name for path in folder.iterdir())

    assert save(RunDirectory(tmp_path), 2, 6, 8) == ["6", "8", "latest"]
    (folder / "latest").write_text("6\n")
    assert save(RunDirectory(tmp_path), 7, 9) == ["7", "9", "latest"]
    run = RunDirectory(tmp_path)
    (folder / "latest").write_text("7\n")  # while the run goes on from 9
    assert save(run, 12) == ["12", "9", "latest"]


def test_checkpoints_of_an_abandoned_trajectory_stay_while_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def save(*steps: int, keep_last: int) -> list[int]:
        with RunDirectory(tmp_path) as run:
            for step in steps:
                (run.begin_checkpoint(step) / "state.json").write_text(str(step))
                run.finish_checkpoint(step, keep_last=keep_last)
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())

    save(10, 20, 30, 40, keep_last=100)
    (folder / "latest").write_text("10\n")
    assert save(15, 45, keep_last=100) == [10, 15, 20, 30, 40, 45]
    (folder / "latest").write_text("15\n")
    assert save(48, keep_last=4) == [10, 15, 45, 48]


def test_a_newest_checkpoint_that_is_gone_is_refused_with_those_that_are_left(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with RunDirectory(tmp_path) as run:
        for step in (1, 2, 3):
            (run.begin_checkpoint(step) / "state.json").write_text(str(step))
            run.finish_checkpoint(step, keep_last=3)
        shutil.rmtree(folder / "3")
        with pytest.raises(RunDirectoryError, match=r"latest names step 3, .* left: 1, 2; write one of them into"):
            run.latest_checkpoint()
        (folder / "latest").write_text("2\n")
        assert run.latest_checkpoint() == (2, folder / "2")
        for step in (1, 2):
            shutil.rmtree(folder / str(step))
        with pytest.raises(RunDirectoryError, match=r"latest names step 2, .* left: none; to begin anew, remove"):
            run.latest_checkpoint()


def test_a_run_saves_on_although_its_newest_checkpoint_was_removed(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        for step in (1, 2):
            (run.begin_checkpoint(step) / "state.json").write_text(str(step))
            run.finish_checkpoint(step, keep_last=2)
            shutil.rmtree(tmp_path / "checkpoints" / "1", ignore_errors=True)
        assert run.latest_checkpoint() == (2, tmp_path / "checkpoints" / "2")


def test_a_reader_takes_the_checkpoint_that_became_the_newest_while_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointer, read = tmp_path / "latest", Path.read_text
    pointer.write_text("1\n")
    (tmp_path / "2").mkdir()

    def read_then_save(path: Path, **given: str) -> str:
        text = read(path, **given)
        pointer.write_text("2\n")
        return text

    monkeypatch.setattr(Path, "read_text", read_then_save)
    assert Checkpoints(tmp_path).latest() == (2, tmp_path / "2")


def test_a_step_does_not_wait_for_the_removal_of_older_checkpoints_but_the_next_save_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system frees hundreds of GiB slowly: 36 ms each were measured on ext4."""
    may_go_on, remove = threading.Event(), shutil.rmtree

    def remove_late(path: Path, ignore_errors: bool = False) -> None:
        assert may_go_on.wait(DEADLINE_S)
        remove(path, ignore_errors=ignore_errors)

    folder = tmp_path / "checkpoints"
    with RunDirectory(tmp_path) as run:
        monkeypatch.setattr(shutil, "rmtree", remove_late)
        for step in (1, 2):
            (run.begin_checkpoint(step) / "state.json").write_text(str(step))
            run.finish_checkpoint(step, keep_last=1)
        assert run.latest_checkpoint() == (2, folder / "2")
        assert sorted(path.name for path in folder.iterdir()) == ["1.removed.partial", "2", "latest"]
        may_go_on.set()
        run.begin_checkpoint(3)
        assert sorted(path.name for path in folder.iterdir()) == ["2", "3.partial", "latest"]


def test_a_removal_that_was_cut_off_is_made_up_for_by_the_next_save(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with RunDirectory(tmp_path) as run:
        (folder / "1.removed.partial").mkdir()
        assert run.latest_checkpoint() is None
        run.begin_checkpoint(1)
        assert [path.name for path in folder.iterdir()] == ["1.partial"]


def leave_unfinished(path: Path) -> None:
    """What saves, exports and sample writers leave that end in the middle; some lies beside it that is a person's."""
    for folder in ("checkpoints/2.partial/trainer", "checkpoints/2.partial/history", "checkpoints/1.removed.partial"):
        (path / folder).mkdir(parents=True)
    for folder in ("policy.partial", "policy.partial.partial", "checkpoints/mine.partial", "samples", "traces"):
        (path / folder).mkdir(exist_ok=True)
    for file in (
        "checkpoints/2.partial/trainer/__0_0.distcp",
        "policy.partial.partial/model.safetensors",
        "samples/step-2.jsonl",
        "samples/step-2.jsonl.partial",
        "traces/step-2.jsonl.partial",
    ):
        (path / file).write_bytes(bytes(1000))


def unfinished(path: Path) -> list[str]:
    """All partial files and folders below `path`."""
    return sorted(found.relative_to(path).as_posix() for found in path.rglob("*.partial"))


def test_the_end_of_a_run_removes_what_it_could_not_finish(tmp_path: Path) -> None:
    """A save that has filled the disk would keep its room, and no start could write."""
    with RunDirectory(tmp_path) as run:
        (run.begin_checkpoint(1) / "state.json").write_text("1")
        run.finish_checkpoint(1, keep_last=1)
        leave_unfinished(tmp_path)
    assert unfinished(tmp_path) == ["checkpoints/mine.partial"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "latest", "mine.partial"]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-2.jsonl"]


def test_a_start_removes_what_a_killed_one_left_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = holder(tmp_path)
    leave_unfinished(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    write, replace = os.write, Path.replace

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_until_removed(path: Path, target: Path) -> Path:
        assert unfinished(tmp_path) == ["checkpoints/mine.partial", "config.yaml.partial"]
        return replace(path, target)

    monkeypatch.setattr(os, "write", full)  # the text of the lock
    monkeypatch.setattr(Path, "replace", full_until_removed)
    with RunDirectory(tmp_path) as run:
        monkeypatch.setattr(os, "write", write)
        assert unfinished(tmp_path) == ["checkpoints/mine.partial"]
        run.write_config("a: 1\n")
        with pytest.raises(RunDirectoryError, match="in use by another process"):
            RunDirectory(tmp_path)


def test_only_the_holder_of_the_lock_removes_what_is_unfinished(tmp_path: Path) -> None:
    """The save of a living run is unfinished, too."""
    first = RunDirectory(tmp_path)
    first.close()
    with RunDirectory(tmp_path) as second:
        second.begin_checkpoint(3)
        first.close()
        with pytest.raises(RunDirectoryError, match="in use by"):
            RunDirectory(tmp_path)
        assert unfinished(tmp_path) == ["checkpoints/3.partial"]


def test_what_cannot_be_removed_does_not_hide_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on another node may write until it has ended, and a disk may have become read-only."""
    kept, remove = tmp_path / "checkpoints" / "2.partial", shutil.rmtree

    def read_only(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    def end_in_a_save() -> None:
        with RunDirectory(tmp_path) as run:
            run.begin_checkpoint(2)
            monkeypatch.setattr(shutil, "rmtree", read_only)
            raise KeyError

    with pytest.raises(KeyError):
        end_in_a_save()
    assert kept.exists()
    with RunDirectory(tmp_path) as run, pytest.raises(OSError, match="Read-only"):
        run.begin_checkpoint(3)
    monkeypatch.setattr(shutil, "rmtree", remove)
    RunDirectory(tmp_path).close()
    assert not kept.exists()


def test_the_environment_of_an_earlier_start_is_kept_with_its_time(tmp_path: Path) -> None:
    begun_s = time.time()
    with RunDirectory(tmp_path) as run:
        for commit in ("a", "b", "c"):
            run.write_environment({"commit": commit})
    saved = json.loads((tmp_path / "environment.json").read_text())
    assert saved["commit"] == "c"
    assert [one["commit"] for one in saved["earlier"]] == ["a", "b"]
    times = [one["time_s"] for one in (*saved["earlier"], saved)]
    assert begun_s <= times[0] <= times[1] <= times[2] <= time.time()


def test_a_file_is_refused_as_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory(tmp_path / "file")


def test_rows_are_read_up_to_the_incomplete_last_one(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert read_rows(file) == []
    file.write_text("", encoding="utf-8")
    assert read_rows(file) == []
    replace_rows(file, [{"text": "a\u2028b\u00e9"}, {"n": 1}])
    whole = file.read_bytes()
    assert read_rows(file) == [{"text": "a\u2028b\u00e9"}, {"n": 1}]
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        assert read_rows(file) == [{"text": "a\u2028b\u00e9"}][: whole[:cut].count(b"\n")]
