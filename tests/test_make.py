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


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("version_info", "is not Python 3.12: install it, or name it with CUDA_PYTHON="),
        ("ensurepip", "has no module ensurepip, so it makes no environment: install python3.12-venv"),
        ("sysconfig", "there is no header /nowhere/Python.h, which Transformer Engine's extension includes"),
        ("compiler", "there is no C++ compiler compiler, which Transformer Engine's extension needs: install g++"),
        ("machine", "this machine is aarch64, but the packages are locked for x86_64"),
    ],
)
def test_make_refuses_a_gpu_machine_that_lacks_something_before_it_downloads(
    tmp_path: Path, lacks: str, said: str
) -> None:
    (tmp_path / "Python.h").touch()
    python = program(
        tmp_path / "bin",
        "python",
        f'case "$2" in\n*{lacks}*) echo /nowhere; exit 1;;\n*sysconfig*) echo "{tmp_path}";;\nesac',
    )
    if lacks == "machine":
        program(tmp_path / "bin", "uname", "echo aarch64")
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CXX": lacks if lacks == "compiler" else str(python),
    }
    environment = tmp_path / "venv"
    assert said in sentence_of(make("setup-cuda", f"VENV_CUDA={environment}", f"CUDA_PYTHON={python}", **variables))
    assert not environment.exists()


PARTS = ("test-fast", "test-slow", "test-engines", "test-trainer")


def run_of(part: str, folder: Path, *arguments: str, script: str = "exit 0") -> subprocess.CompletedProcess[str]:
    """A part of `make test`, whose Python is a script."""
    program(folder / "bin", "python", script)
    (folder / ".installed").touch()
    return make(part, f"VENV={folder}", *arguments)


def test_a_part_of_the_tests_runs_all_of_its_own_by_default(tmp_path: Path) -> None:
    checked = "--ignore=tests/test_layering.py --ignore=tests/test_packaging.py"
    (tmp_path / "bin").mkdir()
    shown = {part: run_of(part, tmp_path, script='echo "$@"').stdout.splitlines()[-1] for part in PARTS}
    assert shown["test-fast"].startswith(f"-m pytest -q tests {checked} -m not gpu")
    others = f"tests {checked} --ignore=tests/rollout --ignore=tests/megatron_rl"
    assert shown["test-slow"].startswith(f"-m pytest {others} -m not gpu")
    assert shown["test-engines"].startswith("-m pytest tests/rollout -m not gpu")
    assert shown["test-trainer"].startswith("-m pytest tests/megatron_rl -m not gpu")
    none_selected = [run_of(part, tmp_path, script="exit 5").returncode for part in PARTS]
    assert none_selected == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("chosen", "slow", "engines", "trainer"),
    [
        ("tests/launcher", "tests/launcher", None, None),
        ("tests/rollout", None, "tests/rollout", None),
        ("tests/megatron_rl/loss tests/data", "tests/data", None, "tests/megatron_rl/loss"),
        ("tests/rollout/pool tests/data tests/megatron_rl", "tests/data", "tests/rollout/pool", "tests/megatron_rl"),
        ("tests/test_packaging.py", "tests/test_packaging.py", None, None),
    ],
)
def test_the_parts_of_the_tests_divide_what_is_chosen(
    tmp_path: Path, chosen: str, slow: str | None, engines: str | None, trainer: str | None
) -> None:
    (tmp_path / "bin").mkdir()
    for part, wanted in zip(PARTS, (f"-q {chosen}", slow, engines, trainer), strict=True):
        done = run_of(part, tmp_path, f"TESTS={chosen}", "PYTEST_ARGS=-x", script='echo "$@"; exit 5')
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stdout.splitlines()[-1].split())
        if wanted is None:
            assert said == f"{part} has none of: {chosen}"
        else:
            assert said.startswith(f"-m pytest {wanted} -m not gpu") and said.endswith(" -x")
        failed = run_of(part, tmp_path, f"TESTS={chosen}", script="exit 1").returncode
        assert failed == (0 if wanted is None else 2)


def targets_of_the_cpu_environment() -> list[str]:
    """Targets that start something of the project from `.venv`; `test` starts its parts."""
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    return sorted(set(line.split()[1:]) - {"check-code", "help", "setup", "setup-cuda", "rehearse", "test-gpu", "test"})


@pytest.mark.parametrize("target", targets_of_the_cpu_environment())
def test_what_starts_from_the_environment_for_cpus_sees_no_gpu(target: str, tmp_path: Path) -> None:
    for name in ("ruff", "mypy"):
        program(tmp_path / "bin", name, "exit 0")
    program(tmp_path / "bin", "python", 'echo "sees <$CUDA_VISIBLE_DEVICES> $@"')
    (tmp_path / ".installed").touch()
    done = make(target, f"VENV={tmp_path}", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    started = [line for line in done.stdout.splitlines() if line.startswith("sees ")]
    assert started and all(line.startswith("sees <> -m ") for line in started), started


def test_make_refuses_gpu_tests_of_which_none_would_run(tmp_path: Path) -> None:
    refused = make("test-gpu", f"PYTHON={sys.executable}", CUDA_VISIBLE_DEVICES="")
    assert "finds no GPU, so no test would run" in sentence_of(refused) and "pytest" not in refused.stdout
    without_torch = program(tmp_path, "without", "echo no module named torch >&2; exit 1")
    assert "finds no GPU, so no test would run" in sentence_of(make("test-gpu", f"PYTHON={without_torch}"))
    with_gpu = program(tmp_path, "with", 'test "$1" = -c || echo "runs: $@"')
    accepted = make("test-gpu", f"PYTHON={with_gpu}")
    assert accepted.returncode == 0 and "runs: -m pytest tests -m gpu" in accepted.stdout
