"""Programs in the sandbox: what they may do, and everything that they may not."""

import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from rollout.rewards import sandbox
from rollout.rewards.sandbox import Ending, Limits, Outcome, isolation_problem, run_program
from tests.support.deadline import DEADLINE_S

pytestmark = pytest.mark.sandbox


def output(source: str, *, limits: Limits | None = None) -> str:
    outcome = run_program(source, limits=limits)
    assert (outcome.ending, outcome.code) == (Ending.EXITED, 0), outcome
    return outcome.output


def test_this_machine_isolates() -> None:
    assert isolation_problem() == ""


def test_a_program_reads_its_input_and_writes_its_output() -> None:
    assert run_program("print(int(input()) + 1)", stdin="41\n").output == "42\n"


def test_it_sees_no_files_of_the_machine_and_writes_only_to_its_own_folder() -> None:
    seen = output("import os\nprint(*os.listdir('/'), *os.listdir('/tmp'), sep='\\n')").split()
    assert "home" not in seen and "work" not in seen and "program.py" in seen
    for path in ("/usr/x", "/x", "/dev/shm/x"):
        assert run_program(f"open('{path}', 'w')").code != 0
    name = secrets.token_hex(8)
    assert output(f"open('/tmp/{name}', 'w').write('x')\nprint(open('/tmp/{name}').read())") == "x\n"
    assert not (Path("/tmp") / name).exists()


def test_it_deletes_nothing() -> None:
    run_program("import shutil\nfor path in ('/usr/lib', '/lib', '/bin'): shutil.rmtree(path, ignore_errors=True)")
    assert output("print(1)") == "1\n"


def test_it_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = f"""
import socket
for address in (('127.0.0.1', {server.getsockname()[1]}), ('8.8.8.8', 53)):
    try:
        socket.create_connection(address, 2)
        print('connected to', address[0])
    except OSError:
        pass
"""
        outside = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
        assert "connected to 127.0.0.1\n" in outside.stdout  # else the next line would show nothing
        assert output(source) == ""


def test_it_has_no_environment_and_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert "secret" not in output("import os\nprint(dict(os.environ))")
    assert output("print(open('/proc/self/status').read().split('CapEff:')[1].split()[0])").strip("0\n") == ""
    assert output("import os\nprint(os.getuid())") != "0\n"


def test_it_sees_no_other_process() -> None:
    numbers = output("import os\nprint(*(name for name in os.listdir('/proc') if name.isdigit()))").split()
    assert len(numbers) <= 3


def test_processes_are_limited_and_end_with_the_program() -> None:
    source = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        count += 1
except OSError:
    print(count)
"""
    outcome = run_program(source, limits=Limits(wall_s=60, num_processes=8))
    assert outcome.ending is Ending.EXITED  # its children would have slept for ten minutes
    assert 0 < int(outcome.output) <= 8
    assert not [one for one in psutil.process_iter(["cmdline"]) if "/tmp/program.py" in (one.info["cmdline"] or [])]


def test_a_fork_bomb_ends_at_its_limit() -> None:
    outcome = run_program(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=Limits(wall_s=3)
    )
    assert outcome.ending is Ending.TIMEOUT
    assert output("print(1)", limits=Limits(wall_s=30)) == "1\n"


@pytest.mark.parametrize(
    ("source", "limits", "ending"),
    [
        ("while True: pass", Limits(cpu_s=1, wall_s=60), Ending.TIMEOUT),
        ("import time\ntime.sleep(600)", Limits(wall_s=1), Ending.TIMEOUT),
        ("while True: print('x' * 1000)", Limits(wall_s=60, cpu_s=30), Ending.OUTPUT),
        ("b'x' * (1 << 30)", Limits(wall_s=60), Ending.EXITED),
        ("open('/tmp/a', 'wb').write(b'x' * (1 << 26))", Limits(wall_s=60), Ending.EXITED),
        ("open('/dev/shm/a', 'wb').write(b'x' * (1 << 26))", Limits(wall_s=60), Ending.EXITED),
        ("for i in range(64): open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20))", Limits(wall_s=60), Ending.EXITED),
    ],
)
def test_limits_end_a_program(source: str, limits: Limits, ending: Ending) -> None:
    outcome = run_program(source, limits=limits)
    assert outcome.ending is ending and outcome.code != 0
    assert len(outcome.output) <= limits.output_bytes


BUSY_AT_ONCE = """
import os
for _ in range(3):
    if os.fork() == 0:
        break
while True:
    pass
"""
BUSY_ONE_BY_ONE = """
import os, time
while True:
    if os.fork() == 0:
        while time.process_time() < 0.1:
            pass
        os._exit(0)
    os.wait()
"""
BUSY_AND_DONE = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        while time.process_time() < 0.3:
            pass
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("source", [BUSY_AT_ONCE, BUSY_ONE_BY_ONE])
def test_processes_of_a_program_share_its_total_of_cpu_seconds(source: str) -> None:
    began = time.monotonic()
    limits = Limits(cpu_s=int(DEADLINE_S), wall_s=DEADLINE_S, total_cpu_s=1.0)
    assert run_program(source, limits=limits).ending is Ending.TIMEOUT
    assert time.monotonic() - began < DEADLINE_S / 2
    assert output("print(1)", limits=Limits(total_cpu_s=30.0, wall_s=60)) == "1\n"


@pytest.mark.parametrize("limits", [Limits(wall_s=60, total_cpu_s=-0.5), Limits(wall_s=0.0)])
def test_a_program_for_which_no_time_is_left_does_not_run(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.subprocess, "Popen", None)
    assert run_program("print(1)", limits=limits) == Outcome(ending=Ending.TIMEOUT, code=-9, output="")


def test_a_process_that_adopts_orphans_is_told_the_cpu_seconds_of_a_program_and_keeps_no_zombie() -> None:
    source = f"""
import os
from rollout.rewards.process_tree import adopt_orphans, children
from rollout.rewards.sandbox import Limits, run_program
adopt_orphans()
for source in ({BUSY_AND_DONE!r}, "while True: pass"):
    print(run_program(source, limits=Limits(cpu_s=1, wall_s=60)).cpu_s, len(children(os.getpid())))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    (first, *left), (second, *also_left) = [line.split() for line in done.stdout.splitlines()]
    assert float(first) >= 0.6 and float(second) >= 0.9
    assert left == also_left == ["0"]


def test_a_machine_without_bubblewrap_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert "install the package `bubblewrap`" in sandbox._isolation_problem.__wrapped__()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "bwrap: No permissions to create new"),
        ("exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),  # it has isolated nothing, because it has run nothing
    ],
)
def test_a_machine_whose_bubblewrap_cannot_isolate_is_told_why_and_what_to_permit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    fake_bubblewrap(tmp_path, monkeypatch, script)
    problem = sandbox._isolation_problem.__wrapped__()
    assert problem.startswith(f"bubblewrap cannot isolate a program here ({reason}")
    assert "kernel.unprivileged_userns_clone=1" in problem and problem.endswith("or run as root")


def test_a_program_that_bubblewrap_does_not_start_is_an_error_and_not_a_wrong_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "_dropped", lambda: ["/missing"])
    with pytest.raises(OSError, match=r"bwrap: execvp /missing: No such file .*; the program has not run to its end"):
        run_program("print(1)")


@pytest.mark.parametrize("end", ["exit 1", "kill -9 $$"])
def test_the_end_of_bubblewrap_itself_is_no_end_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    fake_bubblewrap(tmp_path, monkeypatch, f'echo "bwrap: Can\'t fork for pid 1" >&2; {end}')
    with pytest.raises(OSError, match="Can't fork for pid 1; the program has not run to its end"):
        run_program("print(1)")


def test_a_limit_that_cannot_be_set_is_an_error_and_not_a_wrong_program() -> None:
    source = """
import resource
from rollout.rewards.sandbox import run_program
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))  # a program gets 64
try:
    print(run_program("print(1)"))
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("prlimit: failed to set the NOFILE resource limit")


@pytest.mark.parametrize("code", [1, 126, 127])
def test_a_program_cannot_pretend_that_it_has_not_run(code: int) -> None:
    source = f"import os, sys\nprint('prlimit: failed', file=sys.stderr, flush=True)\nos._exit({code})"
    outcome = run_program(source)
    assert (outcome.ending, outcome.code, outcome.output) == (Ending.EXITED, code, "")


def test_the_limit_of_the_output_is_that_of_the_program_alone() -> None:
    limits = Limits(output_bytes=5, wall_s=60)
    assert output("print('\\nabc')", limits=limits) == "\nabc\n"
    outcome = run_program("print('abcde')", limits=limits)
    assert (outcome.ending, outcome.output) == (Ending.OUTPUT, "abcde")


def test_a_machine_on_which_a_program_can_start_no_thread_is_told_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on kernels that count other processes of the user, too."""
    monkeypatch.setattr(sandbox, "Limits", partial(Limits, num_processes=1))
    problem = sandbox._isolation_problem.__wrapped__()
    assert problem.startswith("an isolated program can start no thread here, at a limit of 1 processes and threads")
    assert "RLIMIT_NPROC" in problem and "Kernels before 5.14" in problem and platform.release() in problem
    assert "ulimit" not in problem


@pytest.mark.parametrize("limits", [(512 << 20, -1), (-1, -1), (4 << 20, 4 << 20)])
def test_a_program_has_threads_whatever_the_limit_of_stacks_is_on_the_machine(limits: tuple[int, int]) -> None:
    source = f"""
import resource
from rollout.rewards.sandbox import isolation_problem, run_program
resource.setrlimit(resource.RLIMIT_STACK, {limits})
print(isolation_problem() or run_program("import resource\\nprint(resource.getrlimit(resource.RLIMIT_STACK))").output)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    soft = sandbox.STACK_BYTES if limits[1] < 0 else limits[1]
    assert done.stdout.strip() == str((soft, limits[1])), "a program may not raise its stack as on the machine"


def test_a_program_is_not_late_by_time_in_which_the_whole_job_was_stopped() -> None:
    """As if SLURM suspended the job: the process that waits for the program is stopped with it."""
    scorer = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True)
    started = time.monotonic()
    while not (inside := [each for each in family(scorer.pid) if "/tmp/program.py" in each.cmdline()]):
        assert time.monotonic() < started + DEADLINE_S
        time.sleep(0.05)
    stopped = [psutil.Process(scorer.pid), *family(scorer.pid)]
    assert inside[0] in stopped
    for process in stopped:
        process.suspend()
    time.sleep(9.0)
    for process in stopped:
        process.resume()
    output, _ = scorer.communicate(timeout=DEADLINE_S)
    assert output.split() == ["exited", "0"]


SLEEPS = """
from rollout.rewards.sandbox import Limits, run_program

outcome = run_program("import time; time.sleep(3.0)", limits=Limits(wall_s=8.0))
print(outcome.ending, outcome.code)
"""


def fake_bubblewrap(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
