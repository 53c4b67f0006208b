"""Stacks of processes that hang, written into files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from history.own_files import PlantedError
from history.process_stat import start_ticks
from rollout import stacks
from rollout.processes import NODE, VARIABLE, ProcessId, kill_processes
from tests.support.runs.background import ROOT

HANGS = """
import multiprocessing, sys, time
from rollout.processes import ProcessId, redirect_output, write_stacks_on_signal

def child_waits_in_vain():
    print("child", flush=True)
    time.sleep(600)

def loops_for_ever(out):
    me = ProcessId.of_this_process("a-node")
    out.write(f"{me.pid} {me.start_ticks} {me.log}\\n")
    out.flush()
    while True:
        pass

out = open(sys.argv[1], "w")
redirect_output()
write_stacks_on_signal()
child = multiprocessing.get_context("fork").Process(target=child_waits_in_vain)
child.start()
loops_for_ever(out)
"""


@pytest.fixture
def hung(tmp_path):
    """A process that loops and its child that sleeps, with a log on a node of its own folder."""
    log, pipe = tmp_path / "logs" / NODE / "trainer-3.log", tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, str(pipe)], cwd=ROOT, env={**os.environ, VARIABLE: str(log)}
    )
    with pipe.open() as told:
        pid, ticks, path = told.readline().split()
    yield ProcessId(node_id="a-node", pid=int(pid), start_ticks=int(ticks), log=path)
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.kill()
    process.wait()


def test_stacks_of_a_process_and_its_child_lie_in_a_file_named_after_its_log(hung, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    (file,) = stacks.write_stacks([hung], "20260102T030405")
    assert Path(file) == tmp_path / "logs" / "stacks" / os.uname().nodename / "trainer-3-20260102T030405.txt"
    first, second = Path(file).read_text().split("=== process ")[1:]
    assert (
        first.startswith(f"{hung.pid}, running") and "in loops_for_ever" in first and "py-spy: not installed" in first
    )
    assert "in child_waits_in_vain" in second and "in loops_for_ever" not in second.split("--- faulthandler")[0]


def test_py_spy_reads_a_frozen_process_too_or_the_file_says_why_not(hung):
    """The kernel may forbid it to this user (`kernel.yama.ptrace_scope`)."""
    os.kill(hung.pid, signal.SIGSTOP)
    (file,) = stacks.write_stacks([hung], "now")
    text = Path(file).read_text()
    assert f"=== process {hung.pid}, stopped" in text and "nothing was written; the process is frozen" in text
    shown = text.split("--- py-spy:\n")[1]
    assert "loops_for_ever" in shown or (os.geteuid() != 0 and "permi" in shown.lower())


def test_a_process_without_a_handler_is_not_ended_by_the_question(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ticks = start_ticks(process.pid)
    identity = ProcessId(node_id="", pid=process.pid, start_ticks=ticks, log=str(tmp_path / "scorer-0.log"))
    (file,) = stacks.write_stacks([identity], "now")
    assert "faulthandler: not installed in this process" in Path(file).read_text()
    assert process.poll() is None
    assert kill_processes([identity]) == 1
    process.wait()


def test_a_planted_link_is_not_written_through_and_keeps_no_other_stacks_away(tmp_path):
    target, stacks_of = tmp_path / "target", tmp_path / "stacks" / os.uname().nodename
    target.write_text("old")
    stacks_of.mkdir(parents=True)
    (stacks_of / "scorer-0-now.txt").symlink_to(target)
    stacks_of.chmod(0o777)  # so every user may have made the link
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ticks = start_ticks(process.pid)
    names = [str(tmp_path / f"scorer-{number}.log") for number in range(2)]
    identities = [ProcessId(node_id="", pid=process.pid, start_ticks=ticks, log=name) for name in names]
    with pytest.raises(PlantedError, match=r"scorer-0-now\.txt is a link in a folder to which every user may write"):
        stacks.write_stacks(identities, "now")
    assert target.read_text() == "old"
    assert f"=== process {process.pid}" in (stacks_of / "scorer-1-now.txt").read_text()
    process.kill()
    process.wait()


def test_another_process_with_the_same_number_is_left_alone(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stranger = ProcessId(node_id="", pid=process.pid, start_ticks=1, log=str(tmp_path / "trainer-0.log"))
    assert stacks.write_stacks([stranger], "now") == () and kill_processes([stranger]) == 0
    assert process.poll() is None
    process.kill()
    process.wait()
