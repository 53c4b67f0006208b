import errno
import time
from pathlib import Path

import pytest

from launcher.run_dir.stop_request import ANSWERED, StopWatch, answer_request, read_request, write_request


def test_a_request_is_seen_and_stays_seen(tmp_path: Path) -> None:
    watch = StopWatch(run_dir=tmp_path)
    assert not watch()
    write_request(tmp_path, reason="by hand")
    watch._checked_s = 0.0
    assert watch()
    answer_request(tmp_path)
    watch._checked_s = 0.0
    assert watch()


def test_the_file_is_looked_for_once_a_second(tmp_path: Path) -> None:
    watch = StopWatch(run_dir=tmp_path)
    assert not watch()
    write_request(tmp_path, reason="by hand")
    assert not watch()


def test_a_request_for_an_earlier_run_is_ignored(tmp_path: Path) -> None:
    write_request(tmp_path, reason="by hand")
    assert not StopWatch(run_dir=tmp_path, since_s=time.time() + 60)()
    assert StopWatch(run_dir=tmp_path, since_s=time.time() - 60)()


def test_a_request_counts_after_the_clock_was_set_back(tmp_path: Path) -> None:
    write_request(tmp_path, reason="of an earlier run")
    watch = StopWatch(run_dir=tmp_path, since_s=time.time() + 3600)
    assert not watch()
    write_request(tmp_path, reason="by hand")
    watch._checked_s = 0.0
    assert watch()


def test_a_request_for_an_earlier_run_that_cannot_be_read_at_first_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_request(tmp_path, reason="of an earlier run")

    def stale(path: Path, encoding: str) -> str:
        raise OSError(errno.ESTALE, "replaced by another client")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", stale)
        watch = StopWatch(run_dir=tmp_path, since_s=time.time() + 3600)
        assert not watch()
    watch._checked_s = 0.0
    assert not watch()


def test_watches_of_one_process_agree_about_its_start_after_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = StopWatch(run_dir=tmp_path)
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: time.time() + 3600)
    assert StopWatch(run_dir=tmp_path).since_s == first.since_s


def test_what_the_batch_script_writes_is_a_request(tmp_path: Path) -> None:
    (tmp_path / "stop.json").write_text('{"reason": "signal", "requeue": true, "time_s": 1764043200}\n')
    request = read_request(tmp_path)
    assert request is not None and request.requeue
    answer_request(tmp_path)
    assert read_request(tmp_path) is None
    assert read_request(tmp_path, ANSWERED) == request


def test_a_request_that_the_run_has_seen_is_answered_although_somebody_removes_it(tmp_path: Path) -> None:
    watch = StopWatch(run_dir=tmp_path)
    write_request(tmp_path, reason="SLURM's signal", requeue=True)
    watch._checked_s = 0.0
    assert watch()
    (tmp_path / "stop.json").unlink()
    answer_request(tmp_path)
    answered = read_request(tmp_path, ANSWERED)
    assert answered is not None and answered.requeue


def test_a_request_for_an_earlier_run_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    write_request(tmp_path, reason="of an earlier run", requeue=True)
    assert not StopWatch(run_dir=tmp_path, since_s=time.time() + 60)()
    assert read_request(tmp_path, ANSWERED) is None


def test_a_file_that_holds_no_request_is_none(tmp_path: Path) -> None:
    (tmp_path / "stop.json").write_text("[]")
    assert read_request(tmp_path) is None
