"""Machines that `make` refuses before it builds anything, each in one sentence."""

import os
import subprocess
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


def refusal(*arguments: str, before_path: Path, environment: Path) -> str:
    """The sentence of a set-up that is refused."""
    done = subprocess.run(
        ["make", "setup", f"VENV={environment}", *arguments],
        cwd=ROOT,
        env={**without_outer_make(), "PATH": f"{before_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and not environment.exists()
    sentence, *rest = done.stderr.strip().splitlines()
    assert all("Error 2" in line for line in rest), done.stderr
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
    sentence = refusal(f"PYTHON={python}", before_path=tmp_path / "bin", environment=tmp_path / "venv")
    assert sentence.startswith("make: ") and said in sentence
