"""Machines that `make` refuses before it builds or tests anything, each in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outer_make import without_outer_make

ROOT = Path(__file__).resolve().parent.parent


def program(folder: Path, name: str, script: str) -> Path:
    """An executable that stands in the way of the machine's own."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `make` answers; `variables` join those of this process."""
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={**without_outer_make(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def sentence_of(refused: subprocess.CompletedProcess[str]) -> str:
    """The only sentence of a target that is refused."""
    assert refused.returncode == 2
    sentence, *rest = refused.stderr.strip().splitlines()
    assert all("Error 2" in line for line in rest), refused.stderr
    assert sentence.startswith("make: ")
    return sentence


@pytest.mark.parametrize(
    ("name", "script", "python", "said"),
    [
        ("uname", "echo aarch64", "python3", "this machine is aarch64, but the packages are locked for x86_64"),
        (
            "other",
            "exit 0",
            "python9",
            "there is no python9: install Python 3.11 or 3.12, or name one",
        ),
        (
            "python9",
            'test "$1" = --version && echo Python 9.1; exit 1',
            "python9",
            "python9 is Python 9.1, but 3.11 or 3.12 is needed: name one of them with PYTHON=",
        ),
    ],
)
def test_make_refuses_an_unsupported_machine_with_one_sentence(
    tmp_path: Path, name: str, script: str, python: str, said: str
) -> None:
    program(tmp_path / "bin", name, script)
    environment, path = tmp_path / "venv", f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert said in sentence_of(make("setup", f"VENV={environment}", f"PYTHON={python}", PATH=path))
    assert not environment.exists()


def test_make_refuses_gpu_tests_of_which_none_would_run(tmp_path: Path) -> None:
    refused = make("test-gpu", f"PYTHON={sys.executable}", CUDA_VISIBLE_DEVICES="")
    assert "finds no GPU, so no test would run" in sentence_of(refused) and "pytest" not in refused.stdout
    without_torch = program(tmp_path, "without", "echo no module named torch >&2; exit 1")
    assert "finds no GPU, so no test would run" in sentence_of(make("test-gpu", f"PYTHON={without_torch}"))
    with_gpu = program(tmp_path, "with", 'test "$1" = -c || echo "runs: $@"')
    accepted = make("test-gpu", f"PYTHON={with_gpu}")
    assert accepted.returncode == 0 and "runs: -m pytest tests -m gpu" in accepted.stdout
