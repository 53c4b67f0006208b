"""Commits of records that are not in this repository's history, as git and the committed pages state it."""

import re
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

REMARK = "**This commit is not in this repository's history**, so its code cannot be compared with today's"
"""What a page says after such a commit."""
_REMARKED = re.compile(rf"commit `(\w+)`.*{re.escape(REMARK)}")


def absent_commits(commits: Collection[str], *, root: Path, pages: Iterable[str]) -> frozenset[str]:
    """The recorded commits that the history lacks.

    Git answers if it has the history. Otherwise `pages`, the text of the committed pages, answers. So a shallow clone
    or an unpacked archive generates the same pages as a full clone.
    """
    history = _history(root)
    if not any(_is_in(commit, history) for commit in commits):
        shown = {found for page in pages for found in _REMARKED.findall(page)}
        return frozenset(commit for commit in commits if any(commit.startswith(prefix) for prefix in shown))
    return frozenset(commit for commit in commits if not _is_in(commit, history))


def _is_in(commit: str, history: Collection[str]) -> bool:
    """Whether a commit, in full or abbreviated, is in the history."""
    return commit in history or (len(commit) < 40 and any(full.startswith(commit) for full in history))


def _history(root: Path) -> frozenset[str]:
    """All ancestors of HEAD; empty without git, outside a checkout and in a shallow clone."""
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return frozenset()
    return frozenset(_git(root, "rev-list", "HEAD").split())


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command; empty where it fails or git is not installed."""
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
