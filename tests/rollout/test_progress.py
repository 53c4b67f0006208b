"""What a process has done last, as another process reads it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rollout import progress
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT

MARKS = """
import sys, time
from rollout import progress
progress.open_page()
progress.begin("save")
progress.begin("train")
progress.mark("micro batch 1 of 2")
progress.mark("micro batch 2 of 2")
print(progress.page_descriptor(), flush=True)
time.sleep(600)
"""

WRITES = """
import multiprocessing, os, sys, time
from rollout import progress

def write(path, size):
    with open(path, "wb") as file:
        file.write(bytes(size))
    time.sleep(600)

progress.open_page()
progress.begin("save", kind="files")
print(progress.page_descriptor(), flush=True)
multiprocessing.get_context("fork").Process(target=write, args=(sys.argv[1], 5 << 20), daemon=True).start()
time.sleep(600)
"""


def start(script, *arguments):
    line = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def end(process):
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.kill()
    process.wait()


@pytest.mark.parametrize("frozen", [False, True], ids=["asleep", "frozen"])
def test_the_newest_mark_of_another_process_is_read_even_if_it_is_frozen(frozen):
    process, descriptor = start(MARKS)
    if frozen:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
    seen = progress.look(process.pid, descriptor)
    assert seen is not None
    assert (seen.num_marks, seen.num_calls, seen.in_call) == (5, 2, 2)
    assert (seen.text, seen.kind, seen.num_bytes) == ("train: micro batch 2 of 2", "work", 0)
    assert (seen.state == psutil.STATUS_STOPPED) is frozen
    end(process)
    assert progress.look(process.pid, descriptor) is None


def test_bytes_that_a_child_writes_are_progress_of_a_process_that_saves(tmp_path):
    process, descriptor = start(WRITES, str(tmp_path / "file"))
    deadline = time.monotonic() + DEADLINE_S
    while (seen := progress.look(process.pid, descriptor)) is None or seen.num_bytes < 5 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert seen.kind == "files" and seen.text == "save"
    end(process)


SAVES = """
import time
from rollout import progress
progress.open_page()
progress.begin("save", kind="files")
print(progress.page_descriptor(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("states", "waits"), [("SSD", True), ("DSS", True), ("SSR", False)])
def test_a_process_waits_for_a_disk_if_any_of_its_threads_does(tmp_path, states, waits):
    process, descriptor = start(SAVES)
    (tmp_path / str(process.pid)).mkdir()
    (tmp_path / str(process.pid) / "fd").symlink_to(f"/proc/{process.pid}/fd")
    for number, state in enumerate(states):
        task = tmp_path / str(process.pid) / "task" / str(process.pid + number)
        task.mkdir(parents=True)
        (task / "stat").write_text(f"{process.pid + number} (a) S (D) {state} 1 {process.pid} 0")
    seen = progress.look(process.pid, descriptor, proc=str(tmp_path))
    assert seen is not None and seen.waits_for_disk is waits
    end(process)


def test_a_long_text_is_cut_and_a_process_without_a_page_is_unknown():
    script = MARKS.replace("micro batch 2 of 2", "x" * 2000)
    process, descriptor = start(script)
    seen = progress.look(process.pid, descriptor)
    assert seen is not None and seen.text.startswith("train: xxx") and 400 < len(seen.text) < 512
    assert progress.look(process.pid, 0) is None
    end(process)


def test_without_a_page_marks_do_nothing():
    script = "from rollout import progress; progress.begin('x'); progress.mark('y'); print(progress.page_descriptor())"
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True) == "-1\n"
