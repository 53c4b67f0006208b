"""Stages of the first hour that need no GPU, and `python -m tests.support.first_hour_call first|beside`.

The command is that of the first hour in the current folder, with stages that sleep: either the first one, or two of
three that run beside each other. A sleeping stage writes its process and its child's to a file of its name.
"""

import signal
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from launcher.first_hour import __main__ as command
from launcher.first_hour.stages import Stage

SLEEPING = """
    import os, pathlib, subprocess, time
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    part = pathlib.Path("{name}.part")
    part.write_text(f"{{os.getpid()}} {{child.pid}}")
    part.rename("{name}")
    time.sleep(1000)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script(Stage):
    """A stage that runs a text of Python; `sys.argv[1]` is the path of its record."""

    text: str

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-c", textwrap.dedent(self.text), str(self.record_path(folder))]


def script(name: str, text: str, *, limit_s: float = 60.0, beside: bool = False) -> Script:
    return Script(name=name, decides="?", limit_s=limit_s, text=text, beside=beside)


DEVICE = script("device", 'import sys; open(sys.argv[1], \'w\').write(\'{"facts": {"name": "H100"}}\')')


def main(sleeping: str) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    first = script("device", SLEEPING.format(name="device")) if sleeping == "first" else DEVICE
    others = [script(name, SLEEPING.format(name=name), limit_s=1000.0, beside=True) for name in ("one", "two", "three")]
    command.ROOT = Path.cwd()
    command.STAGES = (first, *others)
    return command.main(["--out", "out", "--beside", "2", "--minutes", "30"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
