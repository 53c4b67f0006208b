"""Pages name commits that the repository's history lacks; without the history, the committed pages answer."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.record_file import read_all
from benchmarks.harness.record_history import REMARK, absent_commits
from benchmarks.harness.record_pages import pages
from benchmarks.harness.record_views import VIEWS
from tests.benchmarks.harness.test_record_check import _commit, _tree

LOST = "c" * 40
PAGE = f"* Code: commit `{LOST[:12]}`, clean, 3 rows. {REMARK}."


@pytest.fixture
def checkout(tmp_path) -> tuple[Path, str]:
    subprocess.run(["git", "init", "-q", tmp_path / "whole"], check=True)
    _tree(tmp_path / "whole", {"a.py": "A = 1\n"})
    return tmp_path / "whole", _commit(tmp_path / "whole")


def test_git_says_which_commits_the_history_lacks(checkout) -> None:
    root, commit = checkout
    assert absent_commits({commit, LOST}, root=root, pages=()) == {LOST}
    assert absent_commits({commit[:12], LOST}, root=root, pages=()) == {LOST}
    assert absent_commits({commit}, root=root, pages=(PAGE,)) == set()


def test_without_the_history_the_committed_pages_say_it(checkout, tmp_path) -> None:
    root, commit = checkout
    _tree(root, {"a.py": "A = 2\n"})
    _commit(root)
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{root}", tmp_path / "shallow"], check=True)
    (tmp_path / "unpacked").mkdir()
    for folder in ("shallow", "unpacked"):
        assert absent_commits({commit, LOST}, root=tmp_path / folder, pages=()) == set()
        assert absent_commits({commit, LOST}, root=tmp_path / folder, pages=(PAGE,)) == {LOST}


def test_a_page_and_the_index_remark_an_absent_commit() -> None:
    (record,) = [found for found in read_all() if found.name == "soak"]
    (commit,) = {code.commit for code in record.commits}
    views = {"soak": VIEWS["soak"]}
    plain, remarked = pages([record], views), pages([record], views, absent={commit})
    assert REMARK not in plain["soak.md"]
    assert f"commit `{commit[:12]}`, clean, {len(record.rows)} rows. {REMARK}." in remarked["soak.md"]
    assert f"* [soak](soak.md), commit `{commit[:12]}`" in remarked["index.md"]
    assert absent_commits({commit}, root=Path("/"), pages=remarked.values()) == {commit}
