"""Machine code is cached, and never older than any kernel compiled into it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import history
from history.own_files import is_private_folder

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


USES_ALL = """
import history.index.search, megatron_rl.batching.exchange_kernels, numpy
from rollout.cpu.e4m3_loops import look_up
look_up(numpy.zeros(1, "u1"), numpy.zeros(256, "u2"), numpy.zeros(1, "u2"))
"""


def test_an_installation_and_a_home_that_cannot_be_written_need_no_variable(tmp_path):
    """Numba tries the folders of the source and of the home by locators, which are not asked here."""
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "TMPDIR": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run(code: str) -> str:
        line = [sys.executable, "-c", code]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=False).stderr

    assert run(USES_ALL) == ""
    (cache,) = tmp_path.iterdir()
    assert is_private_folder(cache) and list(cache.glob("cpu_*/*.nbi"))
    cache.chmod(0o777)
    assert f"PlantedError: {cache} is a link, or another user made it" in run("import history.jit")
