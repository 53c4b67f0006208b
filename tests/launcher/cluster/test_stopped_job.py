"""Waits of a job whose processes are all stopped in between, and go on an hour later: nobody is late."""

import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from history import ray_wait
from history.patience import AwakeClock, Patience
from launcher.cluster import alive_nodes, job_folder, pairs
from launcher.cluster.alive_nodes import AliveNode
from launcher.cluster.job_folder import Head, JobFolder
from launcher.commands import job_checks, slurm_job
from launcher.errors import RunInUseError
from launcher.run_dir.run_lock import RunLock
from rollout import remote_kill
from rollout.failures import DeadlineError
from rollout.processes import ProcessId

STOP_S = 3600.0
LIMIT_S = 30.0


@dataclass
class Time:
    """Time of the waits: the second pause is a stop of an hour, and after the third something happens."""

    happens: Callable[[], object] = lambda: None
    now_s: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds + STOP_S * (len(self.pauses) == 2)
        if len(self.pauses) == 3:
            self.happens()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    for module in (job_folder, pairs, job_checks, slurm_job):
        monkeypatch.setattr(module, "time", time)
        monkeypatch.setattr(module, "AwakeClock", partial(AwakeClock, time.monotonic))
    monkeypatch.setattr(ray_wait, "Patience", partial(Patience, clock=time.monotonic))
    return time


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    path = tmp_path / "run" / "slurm" / "7.0"
    path.mkdir(parents=True)
    return JobFolder(path=path, config=tmp_path / "config.yaml")


def test_a_file_that_comes_after_a_stop_is_not_late(time: Time, folder: JobFolder) -> None:
    file = folder.path / "head.json"
    time.happens = file.touch
    assert folder.wait_for([file], LIMIT_S, "")
    with pytest.raises(DeadlineError, match=r"waited 30 s for .*other: nobody writes it$"):
        folder.wait_for([folder.path / "other"], LIMIT_S, "nobody writes it")
    assert time.now_s == pytest.approx(STOP_S + 0.2 * 3 + LIMIT_S, abs=0.5)


def test_a_node_that_listens_after_a_stop_is_present(time: Time, tmp_path: Path) -> None:
    time.happens = (tmp_path / "n1.address").touch
    assert pairs._wait_for(tmp_path, "address", ["n1", "n2"], LIMIT_S) == ["n1"]
    assert time.now_s == pytest.approx(STOP_S + LIMIT_S, abs=0.5)


def test_a_lock_that_is_released_after_a_stop_was_not_in_use(time: Time, folder: JobFolder) -> None:
    time.happens = RunLock(folder.run_dir / "LOCK").release
    job_checks.refuse_in_use(folder.run_dir, timeout_s=LIMIT_S)
    assert len(time.pauses) == 3


def test_a_lock_that_watches_a_run_of_another_node_counts_with_all_its_time(
    time: Time, folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(path: Path) -> None:
        time.now_s += 29.0
        raise RunInUseError("in use by process 3 on node1")

    monkeypatch.setattr(job_checks, "RunLock", watch)
    with pytest.raises(RunInUseError):
        job_checks.refuse_in_use(folder.run_dir, timeout_s=180.0)
    assert time.now_s - STOP_S == pytest.approx(180.0, abs=60.0)


def test_a_head_that_listens_after_a_stop_is_joined(time: Time, folder: JobFolder) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        time.happens = listener.listen
        port = listener.getsockname()[1]
        assert slurm_job._wait_until_ready(Head(address="127.0.0.1", port=1, ready_port=port), folder)


@dataclass
class Run:
    """The process of a run, which ends when it is killed."""

    has_ended: bool = False
    calls: list[str] = field(default_factory=list)
    returncode = 75

    def poll(self) -> int | None:
        return self.returncode if self.has_ended else None

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")
        self.has_ended = True


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_ends_after_a_stop_is_not_killed(
    time: Time, folder: JobFolder, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    run = Run()
    time.happens = lambda: setattr(run, "has_ended", ends)
    monkeypatch.setattr(subprocess, "Popen", lambda line, env: run)
    (folder.path / "over").touch()
    assert slurm_job._run(folder, Head(address="10.0.0.1", port=1, ready_port=2), first_step=0) == 75
    assert run.calls == (["terminate"] if ends else ["terminate", "kill"])


@dataclass
class Tasks:
    """Ray: tasks of `names` end in the look after the stop, others in none."""

    time: Time
    names: tuple[str, ...]

    exceptions = ray.exceptions

    def remote(self, *args: object, **options: object) -> object:
        """`ray.remote`, as a function or with options."""
        del options
        return self if args else lambda function: self

    def options(self, *, scheduling_strategy: object, **options: object) -> SimpleNamespace:
        del options
        return SimpleNamespace(remote=lambda *args: scheduling_strategy)

    def wait(self, refs: list[str], *, timeout: float, **options: object) -> tuple[list[str], list[str]]:
        del options
        self.time.sleep(timeout)
        done = self.names if len(self.time.pauses) > 2 else ()
        return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]

    def get(self, ref: str) -> str:
        return ref


@pytest.fixture
def tasks(time: Time, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    """Tasks of node 1 end after the stop, those of node 2 do not."""
    tasks = Tasks(time, ("id of n1",))
    for module in (alive_nodes, ray_wait, remote_kill):
        monkeypatch.setattr(module, "ray", tasks)
    monkeypatch.setattr(alive_nodes, "NodeAffinitySchedulingStrategy", lambda node_id, soft: node_id)
    monkeypatch.setattr(remote_kill, "NodeAffinitySchedulingStrategy", lambda node_id, soft: node_id)
    return tasks


def test_a_node_that_answers_after_a_stop_is_not_silent(tasks: Tasks) -> None:
    assert alive_nodes.silent_nodes({"n1": "id of n1", "n2": "id of n2"}) == ["n2"]
    assert tasks.time.now_s == STOP_S + alive_nodes.SILENCE_S


def test_a_node_that_tells_its_resources_after_a_stop_is_used(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(alive_nodes, "_answer", lambda ref, node: told.append(node.name))
    alive_nodes._answers([AliveNode(name=name, node_id=f"id of {name}", labels={}) for name in ("n1", "n2")])
    assert told == ["n1"]


def test_processes_whose_end_is_told_after_a_stop_are_waited_for(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_kill, "_kill", tasks)
    monkeypatch.setattr(remote_kill, "_write", tasks)
    monkeypatch.setattr(tasks, "get", lambda ref: ("logs/stacks/n1/trainer-0.txt",))
    process = ProcessId(node_id="id of n1", pid=1, start_ticks=0, host="n1")
    assert remote_kill.kill_on_nodes([process], stacks=True) == ("logs/stacks",)
    assert not caplog.records
