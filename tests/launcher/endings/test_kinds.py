"""The kind of an error, its place, and the screen shown to the user."""

import errno
import pickle
import re
import signal
from pathlib import Path

import pytest
import ray

from launcher.endings.conclusion import Command, conclude, logs_beside, termination_raises
from launcher.endings.kinds import Ending, Verdict, judge
from launcher.endings.saved_work import saved_work
from launcher.endings.screen import WIDTH, screen
from launcher.errors import ConfigError, Terminated
from megatron_rl.controller.publish_refusal import PublishRefusedError
from megatron_rl.controller.stopping import StopRequestedError
from rollout.failures import (
    CallError,
    DeadlineError,
    EnginesLostError,
    Place,
    PlacedError,
    ProcessLostError,
    RewardBrokenError,
    UnusableDeviceError,
    brief,
)

DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineActor
\tactor_id: 1f2e
\tpid: 4711
\tnamespace: megatron_rl
\tip: 10.0.0.7
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) OOM killer"""


class RayActorError(Exception):
    """Stand-in for Ray's error; only name and text matter."""


def remote(cause: Exception) -> Exception:
    """An actor's error as Ray raises it in the caller."""
    trace = f"Traceback (most recent call last):\n  the remote frames\n{type(cause).__name__}: {cause}"
    return ray.exceptions.RayTaskError("f", trace, cause, "ray::Actor.f", 4711, "10.0.0.7").as_instanceof_cause()


def caused(error: Exception, by: BaseException) -> Exception:
    error.__cause__ = by
    return error


TRAINER = Place(role="trainer", ranks=(1,))


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (ConfigError("x"), Ending.USER_INPUT),
        (KeyboardInterrupt(), Ending.INTERRUPTED),
        (Terminated(), Ending.TERMINATED),
        (PublishRefusedError("engine(s) [0] are fenced"), Ending.PUBLISH_REFUSED),
        (EnginesLostError("engines have died 4 times"), Ending.ENGINES_LOST),
        (DeadlineError("rank(s) [1] had not returned after 3 s"), Ending.DEADLINE),
        (RewardBrokenError("x.y has failed"), Ending.REWARD_BROKEN),
        (remote(RewardBrokenError("x.y has failed")), Ending.REWARD_BROKEN),
        (RewardBrokenError("x.y has failed, the last time: MemoryError: "), Ending.REWARD_BROKEN),
        (
            RewardBrokenError("x.y has failed: OSError: [Errno 30] Read-only file system: '/opt/judge'"),
            Ending.REWARD_BROKEN,
        ),
        (caused(RewardBrokenError("x.y has failed"), PermissionError(errno.EACCES, "", "/x")), Ending.REWARD_BROKEN),
        (caused(CallError("trainer.join failed", TRAINER), remote(UnusableDeviceError("x"))), Ending.USER_INPUT),
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a/metrics.jsonl"), Ending.UNWRITABLE),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), Ending.UNWRITABLE),
        (OSError(errno.EROFS, "Read-only file system", "/runs/a/events.jsonl"), Ending.UNWRITABLE),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a"), Ending.NOT_PERMITTED),
        (remote(PermissionError(errno.EPERM, "Operation not permitted", "/runs/a/LOCK")), Ending.NOT_PERMITTED),
        (PermissionError(errno.EPERM, "Operation not permitted"), Ending.DEFECT),  # a signal, not a file
        (CallError("trainer.save failed on rank 0: Stale file handle", TRAINER), Ending.UNWRITABLE),
        (
            CallError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", TRAINER),
            Ending.UNWRITABLE,
        ),
        (caused(CallError("trainer.save failed", TRAINER), remote(OSError(errno.ENOSPC, "full"))), Ending.UNWRITABLE),
        (remote(ValueError('Os { code: 28, kind: StorageFull, message: "..." }')), Ending.UNWRITABLE),
        (RuntimeError("/dev/shm has no room for 9 bytes of a segment"), Ending.UNWRITABLE),
        (MemoryError(), Ending.OUT_OF_MEMORY),
        (remote(MemoryError("big")), Ending.OUT_OF_MEMORY),
        (
            ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory."),
            Ending.OUT_OF_MEMORY,
        ),
        (caused(CallError("x", TRAINER), RuntimeError("CUDA out of memory. Tried ...")), Ending.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous"), Ending.OUT_OF_MEMORY),
        (
            CallError("engine 0: wake_up failed: CUDA Error: out of memory at cumem_allocator.cpp:119"),
            Ending.OUT_OF_MEMORY,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), Ending.OUT_OF_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Ending.OUT_OF_MEMORY),
        (RuntimeError("NCCL error in: x.cpp\nLast error:\nCuda failure 2 'out of memory'"), Ending.OUT_OF_MEMORY),
        (RuntimeError("NCCL error\nCuda failure 700 'illegal address'\nwas it out of memory?"), Ending.DEFECT),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Ending.DEFECT),
        (PublishRefusedError("DefaultCPUAllocator: can't allocate memory: you tried"), Ending.OUT_OF_MEMORY),
        (PublishRefusedError("engine 0: rank 0: DeadlineError: engine rank 0 waited in vain"), Ending.DEADLINE),
        (ProcessLostError("trainer.train failed on rank 1", TRAINER), Ending.PROCESS_LOST),
        (RayActorError(DEATH), Ending.PROCESS_LOST),
        (CallError("engine 0: start failed: RuntimeError: Engine core initialization failed."), Ending.PROCESS_LOST),
        (ray.exceptions.RayActorError(), Ending.PROCESS_LOST),
        (caused(EnginesLostError("engines have died 4 times"), RayActorError(DEATH)), Ending.ENGINES_LOST),
        (StopRequestedError(3), Ending.STOPPED),
        (ZeroDivisionError("x"), Ending.DEFECT),
        (caused(CallError("trainer.train failed on rank 1", TRAINER), remote(KeyError("x"))), Ending.DEFECT),
    ],
)
def test_every_error_has_one_kind(error: BaseException, ending: Ending) -> None:
    assert judge(error).ending is ending


def test_an_error_raised_while_handling_another_has_the_kind_of_the_first() -> None:
    error = KeyError("from the cleaning up")
    error.__context__ = OSError(errno.ENOSPC, "full")
    assert judge(error).ending is Ending.UNWRITABLE


def test_a_process_that_the_memory_killer_ended_has_run_out_of_memory() -> None:
    verdict = judge(ProcessLostError("engine 0: process 4711 ended", Place(role="engine", ranks=(0,))), memory_kills=1)
    assert verdict.ending is Ending.OUT_OF_MEMORY
    assert "the out-of-memory killer ended 1 process(es)" in verdict.message and "engine 0" in verdict.message
    assert judge(KeyError("x"), memory_kills=1).ending is Ending.DEFECT


@pytest.mark.parametrize(
    ("verdict", "of_host"),
    [
        (judge(ProcessLostError("engine 0: process 4711 ended"), memory_kills=1), True),
        (judge(DeadlineError("rank(s) [1] had not returned after 3 s"), memory_kills=1), True),
        (judge(ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")), True),
        (judge(remote(MemoryError("big"))), True),
        (judge(caused(CallError("rank 3 failed: MemoryError: big"), remote(MemoryError("big")))), True),
        (
            judge(caused(CallError("rank 3 failed: CUDA out of memory"), remote(RuntimeError("CUDA out of memory")))),
            False,
        ),
        (judge(OSError(errno.ENOMEM, "Cannot allocate memory")), True),
        (judge(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")), True),
        (judge(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), False),
        (judge(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")), False),
    ],
)
def test_the_advice_names_keys_of_the_memory_that_ran_out(verdict: Verdict, of_host: bool) -> None:
    text = " ".join(screen(verdict, command="run", saved=saved_work(None), log="/tmp/x.log").split())
    assert "memory ran out (exit code 8)" in text and not re.search(r" \.\.\.( |$)", text), "the advice is whole"
    assert ("`history.budget_bytes`" in text) is of_host
    assert ("`engine.kv_cache_bytes`" in text) is not of_host


def test_a_refused_publish_of_bf16_weights_is_not_advised_to_use_bf16() -> None:
    error = PublishRefusedError("engine 0: the probe's gap 0.9 nats exceeds engine.probe_max_logprob_gap.bf16")
    assert "`engine.format=bf16`" in judge(error, in_8_bits=True).advice
    assert "bf16" not in judge(error).advice


def test_the_screen_of_a_broken_reward_names_its_memory_and_no_key_of_engines() -> None:
    verdict = judge(RewardBrokenError("x.y has failed, the last time: MemoryError: "))
    text = screen(verdict, command="run", saved=saved_work(None), log="/tmp/x.log")
    assert "`reward.memory_bytes`" in text and "engine." not in text


def test_exit_codes_differ_and_each_kind_but_one_has_advice() -> None:
    assert len({ending.code for ending in Ending}) == len(Ending)
    quiet = {Ending.USER_INPUT, Ending.STOPPED, Ending.INTERRUPTED, Ending.TERMINATED}
    assert {ending for ending in Ending if not ending.advice} == quiet


@pytest.mark.parametrize(
    "kind",
    [
        CallError,
        ProcessLostError,
        EnginesLostError,
        DeadlineError,
        RewardBrokenError,
        UnusableDeviceError,
        PublishRefusedError,
    ],
)
def test_failures_are_pickled_with_their_place(kind: type[PlacedError]) -> None:
    there = pickle.loads(pickle.dumps(kind("what", Place(role="engine", ranks=(3,), node="10.0.0.7"))))
    assert (type(there), str(there), str(there.place)) == (kind, "what", "engine 3, node 10.0.0.7")
    assert isinstance(there, RuntimeError)


def test_a_remote_error_is_one_line_without_its_traceback() -> None:
    assert brief(remote(KeyError("x"))) == "KeyError: 'x'"
    assert brief(RayActorError(DEATH)) == (
        "process 4711 ended: Worker unexpectedly exits with a connection error code 2. End of file."
    )


def run_directory(path: Path) -> Path:
    """A run directory that has reached step 4."""
    for folder in ("logs", "samples", "checkpoints/4/history"):
        (path / folder).mkdir(parents=True)
    (path / "checkpoints" / "latest").write_text("4\n")
    (path / "metrics.jsonl").write_text("{}\n" * 5)
    for step in range(5):
        (path / "samples" / f"step-{step}.jsonl").write_text("")
    (path / "logs" / "engine-0.log").write_text("vLLM's own words\n")
    return path


def test_the_screen_shows_error_place_saved_state_advice_and_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(role="engine", ranks=(0,), node="10.0.0.7")
    error = caused(PublishRefusedError("engine 0: update failed: checksum", place), remote(RuntimeError("checksum")))
    assert conclude(error, Command(name="run", run_dir=run_directory(tmp_path / "run"))) == 3
    shown = capsys.readouterr()
    assert shown.out == "" and "Traceback" not in shown.err and "remote frames" not in shown.err
    text = " ".join(shown.err.split())
    for part in (
        "megatron-rl run: a publish of weights was refused (exit code 3)",
        "what engine 0: update failed: checksum",
        "where engine 0, node 10.0.0.7",
        f"kept {tmp_path / 'run'}: checkpoint of step 4 with history, metrics of 5 step(s), samples of 5 step(s)",
        "The same command resumes after step 4.",
        f"log {tmp_path / 'run' / 'logs' / 'driver-0.log'} (full traceback) {tmp_path}/run/logs/engine-0.log",
    ):
        assert part in text, text
    log = (tmp_path / "run" / "logs" / "driver-0.log").read_text()
    assert "the remote frames" in log and "PublishRefusedError" in log


def test_the_screen_of_a_file_without_rights_names_it_and_speaks_of_no_full_disk() -> None:
    verdict = judge(remote(PermissionError(errno.EACCES, "Permission denied", "/data/train.jsonl")))
    text = " ".join(screen(verdict, command="sft", saved=saved_work(None), log="/tmp/x.log").split())
    assert "the rights to a file are missing (exit code 10)" in text
    assert "what Permission denied: /data/train.jsonl" in text and "Give this user the rights to the file" in text
    assert "disk" not in text and "space" not in text


def test_the_screen_of_a_device_that_torch_cannot_use_names_rank_and_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "trainer rank 1 is placed on GPU 3, which torch cannot use; use the environment of `make setup-cuda`"
    error = caused(CallError(f"trainer.join failed on rank 1 of 2: {said}", TRAINER), remote(UnusableDeviceError(said)))
    assert conclude(error, Command(name="run", run_dir=run_directory(tmp_path / "run"))) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown and "where trainer rank 1" in shown and "Traceback" not in shown


def test_the_screen_of_a_long_error_is_short_and_narrow() -> None:
    verdict = judge(CallError("a long complaint " * 400, TRAINER))
    lines = screen(verdict, command="run", saved=saved_work(None), log="/tmp/x.log").splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= WIDTH
    assert "nothing" in "\n".join(lines)


def test_a_defect_shows_the_traceback_of_its_first_error_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = caused(CallError("trainer.train failed on rank 1: KeyError: 'x'", TRAINER), remote(KeyError("x")))
    command = Command(name="sft", output=tmp_path / "warm.jsonl")
    assert conclude(error, command) == 70
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("Traceback") == 1 and shown.count("the remote frames") == 1
    assert "trainer rank 1" in shown and f"{tmp_path / 'warm.jsonl.log'} (full traceback)" in shown


def test_the_log_is_written_to_the_temporary_directory_if_the_run_directory_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_directory(tmp_path / "run")
    (run_dir / "logs" / "driver-0.log").mkdir()  # a directory in place of the log file
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert conclude(MemoryError(), Command(name="run", run_dir=run_dir)) == 8
    (log,) = tmp_path.glob("megatron-rl-run-*.log")
    assert str(log) in capsys.readouterr().err


def test_an_interruption_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(KeyboardInterrupt(), Command(name="run", run_dir=run_directory(tmp_path / "run"))) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert "interrupted" in line and "The same command resumes after step 4." in line
    assert not (tmp_path / "run" / "logs" / "driver-0.log").exists()


def test_an_interrupt_by_a_person_is_no_termination() -> None:
    with pytest.raises(KeyboardInterrupt), termination_raises():
        raise KeyboardInterrupt


def test_a_termination_signal_raises_in_the_body_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), termination_raises():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def fail_to_start() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt as error:
        raise RuntimeError("the start was interrupted") from error


def test_an_error_that_a_termination_signal_leads_to_is_a_termination() -> None:
    with pytest.raises(Terminated) as raised, termination_raises():
        fail_to_start()
    assert judge(raised.value).ending is Ending.TERMINATED


def test_the_screen_names_the_log_of_an_engine_of_a_command_without_a_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores.json"
    logs = logs_beside(output)
    logs.mkdir()
    (logs / "engine-2.log").write_text("root cause")
    error = ProcessLostError("engine 2: start failed", Place(role="engine", ranks=(2,)))
    assert conclude(error, Command(name="eval", output=output)) == 9
    assert str(logs / "engine-2.log") in capsys.readouterr().err.replace("\n", "").replace(" ", "")
