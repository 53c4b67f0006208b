"""A row is outdated if code reachable from its benchmark changed; moving that code is no change."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.record_check import findings
from benchmarks.harness.record_code import Sources
from benchmarks.harness.record_file import Record


def _commit(root: Path) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false")
    for command in (("add", "-A"), (*identity, "commit", "-q", "-m", "x")):
        subprocess.run(["git", "-C", root, *command], check=True)
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return head.stdout.strip()


def _tree(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


BENCHMARK = """
from benchmarks.harness.record import write
from rollout.speed import half

WORKER = "rollout.worker.worker.Worker"

def main():
    import history.jit
    return half(4)
"""
FILES = {
    "benchmarks/speed.py": BENCHMARK,
    "benchmarks/harness/record.py": "import launcher.unmeasured\n\ndef write():\n    pass\n",
    "launcher/unmeasured.py": "A = 1\n",
    "rollout/speed.py": '"""Halves."""\n\ndef half(x):\n    """Half."""\n    return x / 2\n',
    "rollout/worker/worker.py": "class Worker:\n    pass\n",
    "history/jit.py": "SIZE = 1\n",
}


@pytest.fixture
def checkout(tmp_path) -> tuple[Path, str]:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    _tree(tmp_path, FILES)
    return tmp_path, _commit(tmp_path)


def _changed(root: Path, commit: str) -> tuple[list[str], int, str]:
    row = {"commit": commit, "dirty": False}
    made = Record(
        name="speed",
        command="python -m benchmarks.speed --json x.json",
        date="2026-01-01",
        inputs=(),
        versions={},
        machine={},
        stolen_share=None,
        rows=(row,),
        goals=(),
        not_measured=(),
    )
    (finding,) = findings([made], Sources(root=root))
    return list(finding.changed), finding.measured, finding.unknown


def test_measured_code_is_found_through_imports_late_imports_and_names_in_strings(checkout) -> None:
    root, commit = checkout
    assert _changed(root, commit) == ([], 4, "")  # neither the writer of records nor its imports


def test_moved_code_and_changed_docstrings_or_imports_are_no_change(checkout) -> None:
    root, commit = checkout
    (root / "rollout/speed.py").unlink()
    (root / "benchmarks/speed.py").unlink()
    _tree(
        root,
        {
            "rollout/pool/rates.py": "SPLIT = 3\n\n\ndef half(x):\n    '''One of two.'''\n    return x / 2  # exact\n",
            "benchmarks/speed/__main__.py": BENCHMARK.replace("rollout.speed", "rollout.pool.rates"),
            "launcher/unmeasured.py": "A = 2\n",
        },
    )
    assert _changed(root, commit) == ([], 4, "")


def test_a_changed_statement_names_its_module_and_a_missing_commit_is_reported(checkout) -> None:
    root, commit = checkout
    _tree(root, {"history/jit.py": "SIZE = 2\n", "rollout/speed.py": "def half(x):\n    return x * 0.5\n"})
    assert _changed(root, commit) == (["history/jit.py (SIZE)", "rollout/speed.py (half)"], 4, "")
    assert _changed(root, "c" * 40) == ([], 0, "commit not in this clone's history")
    assert _changed(root, "") == ([], 0, "commit not in this clone's history")
