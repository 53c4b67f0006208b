"""The limit of a publish, over a clock of the test that jumps as after a stop."""

import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from rollout.transports.deadline import Deadline
from tests.support.deadline import DEADLINE_S


class Clock:
    """The clock of the machine, which goes on while the process is stopped."""

    def __init__(self) -> None:
        self.stopped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.stopped_s


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    clock = Clock()
    deadline = Deadline(60.0, clock)
    clock.stopped_s = 3600.0
    time.sleep(0.6)
    assert not deadline.is_over()


PEERS = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from rollout.transports.deadline import Deadline
from rollout.transports.rendezvous import done

path, rank, action, fault = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
group = dist.ProcessGroupGloo(dist.FileStore(path, 2), rank, 2, timedelta(seconds=60))
payload, byte = torch.zeros(256 << 20, dtype=torch.uint8), [torch.zeros(1, dtype=torch.uint8)]
start = group.send if (action == "send") == (rank == 0) else group.recv
if rank == 1:
    group.recv(byte, 0, 7).wait()
    work = start([payload], 0, 0)
    time.sleep(0.02)
    os.kill(os.getpid(), getattr(signal, fault))
work = start([payload], 1, 0)
group.send(byte, 1, 7).wait()
started = time.monotonic()
print(done(work, group, Deadline(2.0), "gloo"), time.monotonic() - started < 20, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("action", ["send", "recv"])
def test_a_wait_for_a_payload_of_which_a_part_has_come_ends_at_the_limit(
    tmp_path: Path, action: str, fault: str
) -> None:
    """Closing the connections ends no such wait of gloo's."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", PEERS, str(tmp_path / "store")]
    peers = [
        subprocess.Popen([*line, str(rank), action, fault], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said, _ = peers[0].communicate(timeout=DEADLINE_S)
        assert said.split() == ["False", "True"]
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()


def test_time_between_two_waits_counts_although_nobody_asks() -> None:
    deadline = Deadline(2.5)
    time.sleep(3.0)
    assert deadline.is_over()


def test_a_deadline_that_nobody_holds_leaves_no_thread() -> None:
    before = threading.active_count()
    deadline = Deadline(3600.0)
    assert threading.active_count() == before + 1
    held = weakref.ref(deadline)
    del deadline
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() == before and held() is None
