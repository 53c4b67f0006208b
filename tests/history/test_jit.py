"""Machine code is cached, and never older than any kernel compiled into it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import history

INNER = "from history.jit import kernel\n\n\n@kernel\ndef inner(x):\n    return x + {added}\n"
OUTER = (
    "from history.index.inner import inner\nfrom history.jit import kernel\n\n\n"
    "@kernel\ndef outer(x):\n    return 10 * inner(x)\n"
)


@pytest.mark.slow
def test_a_kernel_that_changes_in_another_folder_compiles_its_callers_again(tmp_path):
    package = tmp_path / "history"
    shutil.copytree(Path(history.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "drafting" / "outer.py").write_text(OUTER)

    def answer(added: int) -> tuple[int, int]:
        """Result of the caller's kernel, and how often it was loaded from the cache."""
        (package / "index" / "inner.py").write_text(INNER.format(added=added))
        code = (
            "from history.drafting.outer import outer; "
            "print(outer(1), sum(outer.stats.cache_hits.values()), flush=True)"
        )
        done = subprocess.run(
            [sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        result, hits = done.stdout.split()
        return int(result), int(hits)

    assert answer(1) == (20, 0)
    assert answer(200) == (2010, 0)


@pytest.mark.slow
def test_a_kernel_that_has_not_changed_is_loaded_from_the_cache(tmp_path):
    package = tmp_path / "history"
    shutil.copytree(Path(history.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "index" / "inner.py").write_text(INNER.format(added=1))
    code = "from history.index.inner import inner; inner(1); print(sum(inner.stats.cache_hits.values()))"
    command = [sys.executable, "-B", "-c", code]
    hits = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert [int(each) for each in hits] == [0, 1]
