"""Scripts that hold many engines one after another: begun with the session, asked for when a test needs them.

They take minutes of one core, and most of what is tested meanwhile leaves one free.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 580


@dataclass
class Script:
    """A module that is run with arguments, in the environment of an engine."""

    module: str
    prepare: Callable[[], Sequence[str]]
    """Makes what it reads, and returns its arguments; in the test process."""
    arguments: tuple[str, ...] = ()
    ended: threading.Event = field(default_factory=threading.Event)
    fault: str = ""

    def wait(self) -> tuple[str, ...]:
        """Its arguments, once it has ended well."""
        assert self.ended.wait(2 * TIMEOUT_S), f"{self.module} does not end"
        assert not self.fault, self.fault
        return self.arguments


class Scripts:
    """Runs scripts one after another beside the session."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self._scripts = scripts
        self._process: subprocess.Popen[str] | None = None
        for script in scripts.values():
            script.arguments = tuple(script.prepare())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, name: str) -> tuple[str, ...]:
        """Arguments of a script that has ended."""
        return self._scripts[name].wait()

    def _run(self) -> None:
        from rollout.process_env import ProcessEnv

        environment = os.environ | ProcessEnv(single_node=True).engine(threads=1) | {"PYTHONPATH": str(ROOT)}
        for script in self._scripts.values():
            command = [sys.executable, "-m", script.module, *script.arguments]
            self._process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            try:
                _, errors = self._process.communicate(timeout=TIMEOUT_S)
                script.fault = errors[-4000:] if self._process.returncode else ""
            except subprocess.TimeoutExpired:
                self._process.kill()
                script.fault = f"{script.module} took more than {TIMEOUT_S} s"
            script.ended.set()

    def end(self) -> None:
        """Kill what still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
