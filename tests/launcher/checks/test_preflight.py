"""Checks of a machine before a long run: one line per check, with the fix if it fails."""

import os
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks import preflight
from launcher.cluster.node import NodeResources
from launcher.estimate.disk import record_bytes, run_bytes
from megatron_rl.memory import NO_FURTHER, checkpoint_bytes
from tests.launcher.estimate.runs import planned

Usage = namedtuple("Usage", "total used free")


def test_this_machine_passes_and_every_check_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/rollout/worker/test_exact_int8.py` runs the self-test itself."""
    monkeypatch.setattr(preflight, "SELF_TEST", ("-c", "print('INT8: test products of K equal exact sums')"))
    checks = preflight.machine_checks(tmp_path / "not" / "there")
    assert [check.problem for check in checks] == [""] * 6
    assert all(len(str(check).splitlines()) == 1 for check in checks)
    assert checks[-1].value.startswith("INT8: test products of ")
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("program", "value", "problem"),
    [
        ("print('INFO of vLLM'); print('INT8: test products of K equal exact sums')", "INT8: test products of K", ""),
        ("raise ImportError('no kernel')", "failed: ImportError: no kernel", "run `make setup`"),
        ("import os; os.kill(os.getpid(), 4)", "failed: the process ended by SIGILL", "run `make setup`"),
        ("import sys; sys.exit(3)", "failed: exit code 3 without a message", "run `make setup`"),
        ("import time; time.sleep(9)", "failed: no result after 1 s", "run `make setup`"),
    ],
)
def test_the_self_test_of_kernels_is_one_line_or_a_refusal(
    node: NodeResources, monkeypatch: pytest.MonkeyPatch, program: str, value: str, problem: str
) -> None:
    monkeypatch.setattr(preflight, "SELF_TEST", ("-c", program))
    monkeypatch.setattr(preflight, "SELF_TEST_TIMEOUT_S", 1.0 if "sleep" in program else 600.0)
    check = preflight.kernels(node, "a CPU", ["avx2"])
    assert value in check.value and problem in check.problem and bool(problem) == bool(check.problem)
    assert len(str(check).splitlines()) == 1


def test_a_machine_without_the_library_of_the_cpu_kernels_is_told_its_package(
    node: NodeResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of GPUs do not need it."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setattr(preflight, "SELF_TEST", ("-c", "print('INT8: test products of K equal exact sums')"))
    check = preflight.kernels(node, "a CPU", ["avx2"])
    assert "need libnuma.so.1; install" in check.problem and "libnuma1" in check.problem
    assert "make setup" not in check.problem
    assert not preflight.kernels(replace(node, gpu_bytes=(80 << 30,)), "a CPU", ["avx2"]).problem


def test_each_check_names_the_bound_and_the_fix(
    node: NodeResources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "needs 3.11 or 3.12; make the environment anew" in preflight.python((3, 13)).problem
    assert "needs x86_64" in preflight.processor("aarch64", node).problem
    assert "needs 3.00 GiB; end other programs" in preflight.memory(replace(node, available_bytes=1 << 30)).problem
    assert "need AVX2" in preflight.kernels(node, "an old one", []).problem
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1, 1, 64 << 20))
    small = preflight.disk("shared memory", tmp_path, preflight.MIN_SHARED_BYTES, "enlarge it")
    assert str(small) == f"  shared memory  0.06 GiB free at {tmp_path} - needs 0.50 GiB; enlarge it"


def test_a_run_that_holds_its_checkpoints_needs_room_for_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are those of holes. A file of a snapshot that two checkpoints share is one file on the disk."""
    run = planned(run_dir=str(tmp_path / "run"), checkpoint={"keep_last": 2}, history={"drafts": False})
    needed = run_bytes(run.config, run.spec)
    size = checkpoint_bytes(run.spec, run.config.trainer)
    for name, num_bytes in (("checkpoints/step-1/a", size), ("samples/step-1.jsonl", 10), ("logs/x", 1 << 40)):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True)
        path.touch()
        os.truncate(path, num_bytes)
    (tmp_path / "run/checkpoints/step-2").mkdir()
    os.link(tmp_path / "run/checkpoints/step-1/a", tmp_path / "run/checkpoints/step-2/a")

    def with_free(free: int) -> preflight.Check:
        monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1, 1, free))
        return preflight.run_disk(tmp_path, run.config, run.spec, NO_FURTHER)

    assert not with_free(needed - size - 10).problem
    records = (record_bytes(run.config) - 10) / 2**30
    assert f"{records:.2f} GiB of it for samples" in with_free(needed - size - 11).problem
