"""Ray that waits for ever, at its start or at its end: its processes are killed, and the command goes on."""

import subprocess
import sys
import time

import psutil
import pytest

from launcher.cluster import ray_limits
from launcher.cluster.ray_limits import end_ray, limited_start
from rollout.failures import DeadlineError
from tests.support.deadline import DEADLINE_S

HANGS = """
import sys, threading
from launcher import cli
from launcher.cluster import ray_limits
ray_limits.END_LIMIT_S = ray_limits._AFTER_KILL_S = 0.1
cli._dispatch = lambda arguments, command: [ray_limits.end_ray(threading.Event().wait), print("screen"), 7][-1]
sys.exit(cli.main(["status", "nowhere"]))
"""


@pytest.fixture
def program_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A child process that runs a program of a package named ray, and ignores SIGTERM."""
    package = tmp_path / "ray"
    package.mkdir()
    program = package / "raylet.py"
    program.write_text("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)")
    monkeypatch.setattr(ray_limits.ray, "__file__", str(package / "__init__.py"))
    child = subprocess.Popen([sys.executable, str(program)])
    yield child
    child.kill()


def fails_when_it_ends(program: subprocess.Popen[bytes]) -> None:
    program.wait(DEADLINE_S)
    raise RuntimeError("the raylet has died")


def test_a_start_that_waits_for_a_process_ends_when_the_process_is_killed(monkeypatch, caplog, program_of_ray) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    monkeypatch.setattr(ray_limits, "START_LIMIT_S", 0.5)
    with pytest.raises(DeadlineError, match="did not start within"), limited_start():
        fails_when_it_ends(program_of_ray)
    assert "fails_when_it_ends > subprocess.py:" in caplog.text, "the log says where Ray waited"
    assert other.poll() is None, "another process of the command lives on"
    other.kill()


def test_a_start_in_time_is_left_alone(monkeypatch, program_of_ray) -> None:
    monkeypatch.setattr(ray_limits, "START_LIMIT_S", 0.5)
    with limited_start():
        pass
    with pytest.raises(ZeroDivisionError), limited_start():
        raise ZeroDivisionError
    time.sleep(1)
    assert program_of_ray.poll() is None


def test_an_end_that_waits_for_a_process_ends_when_the_process_is_killed(monkeypatch, caplog, program_of_ray) -> None:
    monkeypatch.setattr(ray_limits, "END_LIMIT_S", 0.5)
    ended: list[int] = []
    end_ray(lambda: ended.append(program_of_ray.wait(DEADLINE_S)))
    assert ended == [-9] and "it did not end within" in caplog.text
    assert not psutil.pid_exists(program_of_ray.pid)


def test_a_command_whose_ray_never_ends_exits_with_its_code() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stdout) == (7, "screen\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "threading.py" in line and line.endswith("did not end within 0 s, so its processes are killed")
