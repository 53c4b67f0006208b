"""Marks as `slow` every test that needs Ray, trainer processes, a vLLM engine or a whole run.

`mark_slow` reads fixtures and imports after collection, so that `-m "not slow"` needs no list of folders: a new test
of an engine is slow by the fixture that it asks for. A test that is slow for another reason carries the mark itself.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

SLOW_FIXTURES = frozenset({"background", "checkpoints", "ranks", "running"})
"""Fixtures of minutes-long jobs, of vLLM engines, of trainer processes and of Ray.

All tests have `background`, which is automatic; only tests and fixtures that ask for it wait for a job.
"""

SLOW_IMPORTS = (
    "tests.support.engines.drafting",
    "tests.support.engines.live",
    "tests.support.runs.drafting_runs",
    "tests.support.runs.ring",
    "tests.support.runs.whole_runs",
    "vllm",
)
"""Modules whose importers start engines or runs; a package stands for all its modules."""


LONG_FIXTURES = frozenset(
    {
        "ahead",
        "answers",
        "ended",
        "evaluated",
        "fed_with_changes",
        "interrupted",
        "killed",
        "parallel_formats",
        "ring",
        "trainer_lost",
        "uninterrupted",
        "warm_start",
    }
)
"""Fixtures of `make test-long`: whole runs, a trainer with two engines, engines with two ranks, and a dozen engines
that prove that drafts lose nothing."""


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Add the mark `long` to the tests that need a long fixture. Others carry the mark themselves."""
    for item in items:
        if _requested_fixtures(item) & LONG_FIXTURES:
            item.add_marker(pytest.mark.long)


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Add the mark `slow` to the tests that need a slow fixture or whose module has a slow import."""
    for item in items:
        if _requested_fixtures(item) & SLOW_FIXTURES or has_slow_import(item.path):
            item.add_marker(pytest.mark.slow)


def is_left_out(path: Path, marks: str) -> bool:
    """Whether the expression `marks` (-m of pytest) selects no test of a file that `mark_slow` marks whole."""
    if " or " in marks or "not slow" not in marks.split(" and "):
        return False
    return path.match("test_*.py") and has_slow_import(path)


def _requested_fixtures(item: pytest.Item) -> set[str]:
    """Names of fixtures that the test or one of its fixtures asks for; automatic fixtures alone are not asked for."""
    if not isinstance(item, pytest.Function):
        return set()
    info = item._fixtureinfo
    names = {name for mark in item.iter_markers("usefixtures") for name in mark.args} | set(info.argnames)
    for definitions in info.name2fixturedefs.values():
        for definition in definitions:
            names |= set(definition.argnames)
    return names


@cache
def has_slow_import(path: Path) -> bool:
    """Whether a file imports one of `SLOW_IMPORTS`, at its head or inside a function."""
    return any(name == slow or name.startswith(f"{slow}.") for name in _imported_names(path) for slow in SLOW_IMPORTS)


def _imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
