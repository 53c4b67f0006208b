"""Follows every guide literally: files are written, edits applied, commands run, printed lines compared."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, Block, blocks
from tests.support.deadline import DEADLINE_S

pytestmark = pytest.mark.slow  # a dozen commands, each with its own imports

GUIDES = DOCS / "guides"
FIRST = "own_data"
"""Other guides begin in the folder that this one leaves."""
PACKAGES = ("history", "rollout", "megatron_rl", "launcher", "examples")


def follow(guide: str, root: Path) -> None:
    printed = ""
    for block in blocks(GUIDES / f"{guide}.md"):
        if block.kind == "sh":
            printed = "".join(command(line, root) for line in block.text.splitlines())
        elif block.kind == "output":
            missing = [line for line in block.text.splitlines() if line not in printed]
            assert not missing, f"{guide}: {missing} is not in\n{printed}"
        elif block.kind == "diff":
            edit(root / block.file, block)
        else:
            assert block.file, f"{guide}: a block of {block.kind} names no file"
            (root / block.file).parent.mkdir(parents=True, exist_ok=True)
            (root / block.file).write_text(block.text)


def command(line: str, root: Path) -> str:
    name, *arguments = line.split()
    assert name == "python", f"{line}: guides run Python modules"
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def edit(file: Path, block: Block) -> None:
    """Replace the lines that begin with `-`, which must occur once in the file, by the lines that begin with `+`."""
    lines = block.text.splitlines()
    old, new = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
    text = file.read_text()
    assert text.count(old) == 1, f"{file}: {old!r} stands there {text.count(old)} times"
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources in which the first guide has been followed."""
    root = tmp_path_factory.mktemp("checkout")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "work"))
    follow(FIRST, root)
    return root


def test_every_guide_has_a_test() -> None:
    assert {page.stem for page in GUIDES.glob("*.md")} == {FIRST, *OTHERS}


OTHERS = (
    "own_reward",
    "code_reward",
    "own_loss",
    "add_a_model",
    "add_a_transport",
    "slurm",
    "doctor",
    "troubleshooting",
)


@pytest.mark.slow
@pytest.mark.parametrize("guide", OTHERS)
def test_a_guide_works_as_written(guide: str, checkout: Path) -> None:
    follow(guide, checkout)
