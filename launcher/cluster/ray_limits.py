"""Time limits for the start and the end of Ray on this machine, and for a join.

Ray limits parts of its own start only, and its end not at all: a call that waits for one of Ray's processes would hold
the command for ever. Here the processes are killed at a limit, the log says where Ray waited, and the command goes on.
A join of an address where nobody listens takes Ray a quarter of an hour; here it takes a minute.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray

from launcher.cluster.node import END_OF_RAY
from rollout.failures import DeadlineError
from rollout.processes import children, send_signal

_log = logging.getLogger(__name__)

START_LIMIT_S = 240.0
"""Longest start of Ray's processes; on a free machine it takes seconds."""
END_LIMIT_S = 60.0
"""Longest end; Ray gives each of its processes a second to end."""
LISTEN_LIMIT_S = 60.0
"""For which a head that was just started may take to listen."""
_POLL_S = 1.0
_AFTER_KILL_S = 5.0
"""For which the end may go on when the processes are dead."""
_FRAMES = 6
"""Innermost calls of a stack that the log names."""


def await_listener(address: str) -> None:
    """Wait until somebody listens at `host:port`; another form of address is not looked at.

    Raises:
        ConnectionError: nobody did in `LISTEN_LIMIT_S`; the message has the last try's error.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    place, deadline = (host.strip("[]"), int(port)), time.monotonic() + LISTEN_LIMIT_S
    while True:
        try:
            socket.create_connection(place, timeout=max(deadline - time.monotonic(), _POLL_S)).close()
            return
        except OSError as error:
            if time.monotonic() + _POLL_S > deadline:
                raise ConnectionError(f"nobody listened there in {LISTEN_LIMIT_S:.0f} s ({error})") from error
            time.sleep(_POLL_S)


@contextmanager
def limited_start() -> Iterator[None]:
    """Within the context Ray starts; what does not start in `START_LIMIT_S` is killed.

    Raises:
        DeadlineError: Ray did not start in time.
    """
    starting, late = threading.get_ident(), threading.Event()

    def kill() -> None:
        late.set()
        _give_up("start", START_LIMIT_S, starting)

    timer = threading.Timer(START_LIMIT_S, kill)
    timer.daemon = True
    timer.start()
    error: BaseException | None = None
    try:
        yield
    except Exception as raised:
        if not late.is_set():
            raise
        error = raised
    finally:
        timer.cancel()
    if late.is_set():
        raise DeadlineError(
            f"Ray did not start within {START_LIMIT_S:.0f} s; end other programs of this machine and try again"
        ) from error


def end_ray(end: Callable[[], object] | None = None) -> None:
    """End Ray in this process; what does not end in `END_LIMIT_S` is killed. The thread may still wait afterwards."""
    ending = threading.Thread(target=end or ray.shutdown, name=END_OF_RAY, daemon=True)
    ending.start()
    ending.join(END_LIMIT_S)
    if ending.is_alive() and ending.ident is not None:
        _give_up("end", END_LIMIT_S, ending.ident)
        ending.join(_AFTER_KILL_S)


def kill_families(roots: Sequence[psutil.Process]) -> None:
    """Kill processes and all their descendants."""
    for root in roots:
        send_signal([*children(root, recursive=True), root], signal.SIGKILL)


def _give_up(what: str, limit_s: float, thread: int) -> None:
    """Say where a thread of this process waits, and kill Ray's processes."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))[-_FRAMES:]
    where = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    _log.warning("Ray waits in %s; it did not %s within %.0f s, so its processes are killed", where, what, limit_s)
    kill_families(_processes_of_ray())


def _processes_of_ray() -> list[psutil.Process]:
    """Children of this process that run programs of the package ray."""
    package, found = f"{Path(ray.__file__).parent}{os.sep}", []
    for child in children(psutil.Process()):
        with suppress(psutil.Error):
            if any(package in argument for argument in child.cmdline()):
                found.append(child)
    return found
