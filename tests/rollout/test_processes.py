"""Processes of an owner that is killed end too; a process is found by its identity whatever the wall clock says."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from history.process_stat import stat_fields
from rollout import processes
from rollout.processes import (
    ProcessId,
    children,
    family,
    given_devices,
    kill_processes,
    no_collection,
    on_devices,
    send_signal,
)
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT

OWNER = """
import subprocess, sys, time
core = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(__import__("os").getpid()), sys.argv[2]])
time.sleep(600)
"""

CORE = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
time.sleep(600)
"""

RANK = """
import os, sys, time
from rollout.processes import die_with
die_with(int(sys.argv[1]))
print(os.getppid(), os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_rank_and_its_core_process_end_with_the_owner():
    owner = subprocess.Popen([sys.executable, "-c", OWNER, CORE, RANK], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    orphans = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(orphans) == 2 and all(process.is_running() for process in orphans)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    gone, alive = psutil.wait_procs(orphans, timeout=DEADLINE_S)
    assert len(gone) == 2 and not alive


def test_a_process_without_owner_keeps_running():
    script = "import time; from rollout.processes import die_with; die_with(1 << 22); time.sleep(0.1); print('here')"
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True) == "here\n"


@pytest.mark.parametrize("devices", [[], ["3"], ["GPU-5", "GPU-7"]])
def test_a_process_knows_the_devices_that_it_was_given(devices: list[str]):
    assert given_devices({"OMP_NUM_THREADS": "1"} | on_devices(devices)) == ",".join(devices)


def test_devices_that_a_user_names_are_not_given_to_a_process_on_the_cpu():
    assert given_devices({"CUDA_VISIBLE_DEVICES": "0"} | on_devices([])) == ""


def test_collection_pauses_for_imports_also_if_they_fail_and_stays_off_where_it_was_off():
    def failing_import():
        with no_collection():
            with no_collection():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError

    assert gc.isenabled()
    with pytest.raises(ImportError):
        failing_import()
    assert gc.isenabled()


PARENT = """
import dataclasses, json, subprocess, sys, time
from rollout.processes import ProcessId
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps(dataclasses.asdict(ProcessId.of_this_process("a-node"))), child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("step_s", [-3600.0, 2.0])
def test_a_process_and_its_child_are_killed_after_the_wall_clock_was_set(monkeypatch, step_s: float):
    """psutil adds the time of the boot, which the kernel computes from the present wall clock."""
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        told, _, child = parent.stdout.readline().rpartition(" ")
        members = [psutil.Process(pid) for pid in (parent.pid, int(child))]
        try:
            identity = ProcessId(**json.loads(told))
            booted_s = psutil.boot_time()
            monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + step_s)
            assert family(identity) == members
            assert family(replace(identity, start_ticks=identity.start_ticks - 1)) == [], "another had its number"
            assert kill_processes([identity]) == 2
            assert not any(member.is_running() for member in members)
            assert kill_processes([identity]) == 0
        finally:
            send_signal(members, signal.SIGKILL)


def test_processes_of_other_users_may_be_hidden(monkeypatch):
    """With `hidepid=1` their files cannot be opened."""

    def refuse(*_: object) -> dict[int, int]:
        raise psutil.AccessDenied(1)

    def shown(pid: int) -> list[str]:
        if pid == 1:
            raise PermissionError(1, "Operation not permitted", "/proc/1/stat")
        return stat_fields(pid)

    monkeypatch.setattr("psutil._ppid_map", refuse)
    monkeypatch.setattr(processes, "stat_fields", shown)
    line = ["sh", "-c", "sleep 600 & echo up; wait"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            members = psutil.Process(child.pid), *children(psutil.Process(child.pid))
            until = time.monotonic() + DEADLINE_S
            while members[1].name() != "sleep" and time.monotonic() < until:
                time.sleep(0.01)  # between fork and exec
            assert {*members} <= {*children(psutil.Process(), recursive=True)}
            assert members[0] in children(psutil.Process()) and members[1] not in children(psutil.Process())
            own = ProcessId.of_this_process("a-node").with_children()
            assert {member.pid for member in members} <= {pid for pid, _ in own.children}
            assert {*members} <= {*family(own)}
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    parent = psutil.Process().parent()
    monkeypatch.setattr(psutil.Process, "parent", lambda me: parent if me.pid == os.getpid() else refuse())
    assert processes._ancestors(psutil.Process()) == [parent]


def test_a_child_that_outlives_a_killed_process_is_killed_by_what_the_process_told_before():
    """As vLLM's process does, which holds memory of a device until it has ended."""
    script = PARENT.replace('("a-node")', '("a-node").with_children()')
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        told, _, pid = parent.stdout.readline().rpartition(" ")
        child = psutil.Process(int(pid))
        try:
            identity = ProcessId(**json.loads(told))
            assert family(identity) == [psutil.Process(parent.pid), child]
            parent.kill()
            parent.wait()
            assert family(identity) == [child]
            assert family(replace(identity, children=((child.pid, 1),))) == [], "another had its number"
            assert kill_processes([identity]) == 1
            assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        finally:
            send_signal([child], signal.SIGKILL)


def test_a_process_tells_the_same_of_itself_after_the_clock_was_set(monkeypatch):
    """Restarts are counted by the different values."""
    before = ProcessId.of_this_process("a-node")
    booted_s = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 2.0)
    assert ProcessId.of_this_process("a-node") == before
