"""Processes of an owner that is killed end too."""

import gc
import os
import signal
import subprocess
import sys

import psutil
import pytest

from rollout.processes import given_devices, no_collection, on_devices
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
