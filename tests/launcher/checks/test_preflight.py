"""What a machine must have before a long run: a line a check, a sentence where it fails."""

from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks import preflight
from launcher.cluster.node import NodeResources

Usage = namedtuple("Usage", "total used free")


def test_this_machine_is_fit_and_every_check_is_one_line(tmp_path: Path) -> None:
    checks = preflight.machine_checks(tmp_path / "not" / "there")
    assert [check.problem for check in checks] == [""] * 6
    assert all(len(str(check).splitlines()) == 1 for check in checks)
    assert not (tmp_path / "not").exists()


def test_each_check_names_the_bound_and_the_fix(
    node: NodeResources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "needs 3.11 or 3.12; make the environment anew" in preflight.python((3, 13)).problem
    assert "needs x86_64" in preflight.processor("aarch64", node).problem
    assert "needs 3.00 GiB; end other programs" in preflight.memory(replace(node, available_bytes=1 << 30)).problem
    assert "need AVX2" in preflight.kernels("an old one", []).problem
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1, 1, 64 << 20))
    small = preflight.disk("shared memory", tmp_path, preflight.MIN_SHARED_BYTES, "enlarge it")
    assert str(small) == f"  shared memory  0.06 GiB free at {tmp_path} - needs 0.50 GiB; enlarge it"
