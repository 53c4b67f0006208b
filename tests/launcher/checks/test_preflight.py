"""Checks of a machine before a long run: one line per check, with the fix if it fails."""

from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks import preflight
from launcher.cluster.node import NodeResources

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
