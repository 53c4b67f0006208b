"""Sends what a process prints, and what its children print, to a file of the run directory.

File descriptors are redirected, not Python objects: vLLM, gloo and the allocator write to them directly.
"""

import os
import sys

VARIABLE = "MEGATRON_RL_LOG"
"""Environment variable that names the file; set by whoever starts the process."""


def redirect_output() -> None:
    """Append standard output and error to the file that `VARIABLE` names; nothing without it."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
