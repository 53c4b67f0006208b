"""The start of a process, compared with a clock that began at the boot."""

import os
import subprocess
import sys
import time

import pytest

from history.process_stat import start_ticks, stat_fields

NAMED = """
import time
with open("/proc/self/comm", "wb") as name:
    name.write(b"a) S 1 (\\xff b")
print("named", flush=True)
time.sleep(600)
"""


def test_the_start_is_the_time_since_the_boot_whatever_the_name_of_the_process():
    ticks_s = os.sysconf("SC_CLK_TCK")
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    process = subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE)
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert process.stdout is not None and process.stdout.readline() == b"named\n"
    try:
        assert before * ticks_s - 1 <= start_ticks(process.pid) <= after * ticks_s + 1
        assert stat_fields(process.pid)[1] == str(os.getpid())
    finally:
        process.kill()
        process.wait()
    with pytest.raises(FileNotFoundError):
        start_ticks(process.pid)
