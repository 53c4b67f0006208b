"""The process that starts reward workers: it has imported the reward function, and forks a worker in milliseconds.

    scorer -- control socket --> server -- fork --> worker --> what the reward function starts
       '------------------ a channel to each worker ---------------'

The server has one thread, no Ray and an environment without secrets. It is the only parent of workers, so it alone
kills and reaps them: a process id is never used after its process was reaped. Each worker leads a session of its own.
Its whole group is killed when the worker is ended or has died. Processes that left the group become children of the
server then, which kills them as well. The server ends, with all of this, when the scorer closes the control socket or
dies, even if it is frozen then. A frozen server neither starts nor ends a worker; the scorer notices that and kills it
(`rollout.rewards.workers`).
"""

import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from rollout.failures import RewardBrokenError, brief
from rollout.rewards.call import check_reward, is_async, late_score, load_reward
from rollout.rewards.process_tree import (
    adopt_orphans,
    children,
    die_with_parent,
    end_children,
    go_on_after_parent,
    kill,
    kill_group,
    kill_others,
)
from rollout.rewards.worker import WorkerLimits, run_worker

_KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"),
    *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""Variables that reward workers have; Ray's, wandb's and all tokens are not among them."""

_CODE = (
    "import json, sys; arguments = json.loads(sys.argv.pop()); sys.path[:] = arguments.pop('path'); "
    "from rollout.rewards.worker_server import serve; serve(**arguments)"
)
_NUM_BYTES = 1 << 16
"""Longest message of the control socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The server's first message: it has imported the reward function, or has failed to."""

    is_async: bool = False
    """Whether the function is an `async def`."""
    late_score: float | None = None
    """Reward of a late call, if the function's module declares one."""
    error: ValueError | RewardBrokenError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker has ended, and its whole group."""

    number: int
    code: int
    """Exit code; negative for a signal."""


def clean_environment(variables: Mapping[str, str], more: Collection[str]) -> dict[str, str]:
    """The variables that reward workers have: paths, language, threads, proxies, and those named in `more`."""
    return {name: value for name, value in variables.items() if name in _KEPT or name in more}


def start_server(
    function: str, limits: WorkerLimits, environment: Mapping[str, str]
) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """Start a server; returns the control socket and the process. The socket's first message is `Prepared`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = {"path": sys.path, "control_fd": theirs.fileno(), "function": function, "limits": asdict(limits)}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(arguments)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, server


def serve(*, control_fd: int, function: str, limits: dict[str, float]) -> None:
    """Body of the server process."""
    go_on_after_parent()
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    given = WorkerLimits(
        timeout_s=limits["timeout_s"],
        cpu_s=limits["cpu_s"],
        memory_bytes=int(limits["memory_bytes"]),
        file_bytes=int(limits["file_bytes"]),
    )
    prepared = _prepare(function, given)
    control.send(pickle.dumps(prepared))
    if prepared.error is None:
        _Server(control, function, given).run()


def _prepare(function: str, limits: WorkerLimits) -> Prepared:
    """Import the reward function, and let its module judge the settings."""
    try:
        load_reward(function)
    except Exception as error:  # the border to the user's code, which may raise anything while it is imported
        reason = error.__cause__ if isinstance(error, ValueError) else error
        module = function.rpartition(".")[0]
        is_missing = isinstance(reason, ModuleNotFoundError) and f"{module}.".startswith(f"{reason.name}.")
        if isinstance(error, ValueError) and (reason is None or is_missing):
            return Prepared(error=ValueError(str(error)))
        text = f"reward.function: {function}: importing its module failed: {brief(reason or error)}"
        return Prepared(error=RewardBrokenError(text))
    try:
        check_reward(function, timeout_s=limits.timeout_s, cpu_s=limits.cpu_s)
        return Prepared(is_async=is_async(function), late_score=late_score(function))
    except ValueError as error:
        return Prepared(error=ValueError(str(error)))
    except Exception as error:  # as above
        text = f"reward.function: {function}: its module's check of the settings failed: {brief(error)}"
        return Prepared(error=RewardBrokenError(text))


class _Server:
    """Workers by process id. The loop wakes for a command, or when a child has ended."""

    def __init__(self, control: socket.socket, function: str, limits: WorkerLimits) -> None:
        self._control = control
        self._function = function
        self._limits = limits
        self._numbers: dict[int, int] = {}
        """Number of each worker, by its process id."""
        adopt_orphans()
        self._own = frozenset(children(os.getpid()))
        """Processes that the module of the reward function has started while it was imported."""
        self._woken, waker = socket.socketpair()
        self._woken.setblocking(False)
        waker.setblocking(False)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the scorer closes the control socket."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._control and not self._obey():
                        self._end_all()
                        return
                with suppress(BlockingIOError):
                    self._woken.recv(_NUM_BYTES)
                self._reap()

    def _obey(self) -> bool:
        """Carry out one command; False if there will be no more."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, _NUM_BYTES, 1)
        except ConnectionResetError:  # the scorer has ended, and has not read all messages
            return False
        if not message:
            return False
        command, number = message.decode().split()
        if command == "start":
            self._fork(int(number), socket.socket(fileno=descriptors[0]))
        else:
            for pid in [pid for pid, of_pid in self._numbers.items() if of_pid == int(number)]:
                _end(pid)
        return True

    def _fork(self, number: int, channel: socket.socket) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid:
            self._numbers[pid] = number
            channel.close()
            return
        code = 1
        try:
            os.setsid()
            die_with_parent(server)
            adopt_orphans()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._control, self._woken, self._waker):
                inherited.close()
            run_worker(channel, self._function, self._limits)
            code = 0
        except BaseException:  # the end of a forked process: nothing above this frame may run in it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report workers that have ended; kill what they leave behind."""
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                number = self._numbers.pop(ended.si_pid, None)
                if number is not None:
                    kill_group(ended.si_pid)  # before its process id is free for others
                _, status = os.waitpid(ended.si_pid, 0)
                if number is not None:
                    code = os.waitstatus_to_exitcode(status)
                    with suppress(ConnectionError):  # a scorer that has ended closes the socket: `run` sees it next
                        self._control.send(pickle.dumps(Exited(number=number, code=code)))
        kill_others({*self._numbers, *self._own})

    def _end_all(self) -> None:
        for pid in self._numbers:
            _end(pid)
        end_children()


def _end(pid: int) -> None:
    kill_group(pid)
    kill(pid)  # a worker that has just been forked leads no group yet
