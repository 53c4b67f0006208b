"""Jobs that take minutes and little of the machine: begun with the session, asked for when a test needs them.

Scripts that hold many engines one after another use one core; whole runs spend half of their time starting, and what is
tested meanwhile leaves room for them.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.deadline import DEADLINE_S

ROOT = Path(__file__).parents[3]

_started: list[subprocess.Popen[str]] = []


@dataclass
class _Job:
    work: Callable[[], object]
    ended: threading.Event = field(default_factory=threading.Event)
    result: object = None
    fault: BaseException | None = None
    seconds: float = 0.0

    def run(self) -> None:
        begin = time.monotonic()
        try:
            self.result = self.work()
        except BaseException as error:  # whatever it is, it belongs to the test that asks
            self.fault = error
        self.seconds = time.monotonic() - begin
        self.ended.set()


class Background:
    """Runs jobs beside the session: those of a lane one after another."""

    def __init__(self, *lanes: Mapping[str, Callable[[], object]]) -> None:
        self._jobs = {name: _Job(work) for lane in lanes for name, work in lane.items()}
        for lane in lanes:
            threading.Thread(target=self._run, args=(list(lane),), daemon=True).start()

    def _run(self, names: Sequence[str]) -> None:
        for name in names:
            self._jobs[name].run()

    def wait(self, name: str) -> object:
        """What a job has returned; raises what it has raised."""
        job = self._jobs[name]
        assert job.ended.wait(DEADLINE_S), f"{name} does not end"
        if job.fault is not None:
            raise job.fault
        return job.result

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds of each job that has ended, by name."""
        return {name: job.seconds for name, job in self._jobs.items() if job.ended.is_set()}

    def end(self) -> None:
        """End what still runs."""
        for process in _started:
            if process.poll() is None:
                process.terminate()


OF_VLLM = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_COMPILE_THREADS")
"""Variables that an import of vLLM sets, in a session of tests too.

Ray starts processes with their variables in a random order. Where vLLM sets the first one anew, setproctitle does not
find the place of the title, and tests find processes by their titles.
"""


def popen(command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
    """A process that ends with the session at the latest."""
    chosen = {name: value for name, value in (env or os.environ).items() if name not in OF_VLLM}
    process = subprocess.Popen(command, text=True, env=chosen, **options)  # type: ignore[call-overload]
    _started.append(process)
    return process


def run_script(module: str, arguments: Sequence[str]) -> Sequence[str]:
    """Run a module of the tests in the environment of an engine; returns its arguments."""
    from rollout.processes import ProcessEnv

    paths = ":".join(each for each in (str(ROOT), os.environ.get("PYTHONPATH", "")) if each)
    environment = os.environ | ProcessEnv(single_node=True).engine(threads=1) | {"PYTHONPATH": paths}
    process = popen(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-4000:]
    return arguments
