"""Processes of an engine end with the process that owns it.

vLLM's core process survives the death of the process that started it, with its memory (on a GPU: the
device's). An owner that is killed cannot clean up, so its children watch it.

Invariant: nothing is killed but this process and those between it and its owner.
"""

import os
import threading
import time

import psutil

_POLL_S = 1.0


def die_with(owner_pid: int) -> None:
    """End this process, and those between it and its owner, soon after the owner has ended."""
    me = psutil.Process()
    ancestors = me.parents()
    pids = [process.pid for process in ancestors]
    if owner_pid not in pids:
        return
    owner = ancestors[pids.index(owner_pid)]
    between = ancestors[: pids.index(owner_pid)]
    threading.Thread(target=_watch, args=(owner, between), name="owner-watch", daemon=True).start()


def _watch(owner: psutil.Process, between: list[psutil.Process]) -> None:
    while _is_alive(owner):
        time.sleep(_POLL_S)
    for process in between:
        if process.is_running():
            process.kill()
    os._exit(1)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
