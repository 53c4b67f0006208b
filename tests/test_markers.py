"""Tests are marked `slow` by the fixtures that they or their fixtures ask for, and by the imports of their module."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadline import DEADLINE_S
from tests.support.markers import has_slow_import, is_left_out

ROOT = Path(__file__).parents[1]

CONFTEST = """
import pytest
from tests.support.markers import mark_slow

def pytest_collection_modifyitems(items):
    mark_slow(items)

@pytest.fixture(autouse=True)
def background():
    return 0

@pytest.fixture
def running():
    return 0

@pytest.fixture
def job(background):
    return background

@pytest.fixture
def engine(job):
    return job
"""

TESTS = """
import pytest

def test_without_fixtures(): pass
def test_with_a_quick_fixture(tmp_path): pass
def test_of_ray(running): pass
def test_of_a_job(job): pass
def test_of_an_engine(engine): pass
@pytest.mark.usefixtures("running")
def test_that_uses_ray(): pass
@pytest.mark.parametrize("case", [1])
def test_of_a_parametrized_engine(engine, case): pass
"""


def test_tests_that_need_a_slow_fixture_are_deselected(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert re.findall(r"::(\w+)", done.stdout) == ["test_without_fixtures", "test_with_a_quick_fixture"]


@pytest.mark.parametrize(
    ("source", "slow"),
    [
        ("import vllm.platforms", True),
        ("def test():\n    from vllm import SamplingParams", True),
        ("from tests.support.runs import ring", True),
        ("from tests.support.runs.ring import Ring", True),
        ("import vllmlike", False),
        ("from tests.support.runs.background import ROOT", False),
    ],
)
def test_a_module_that_imports_an_engine_or_a_run_is_slow(tmp_path, source, slow):
    path = tmp_path / "test_it.py"
    path.write_text(source)
    assert has_slow_import(path) == slow


@pytest.mark.parametrize(
    ("source", "marks", "left_out"),
    [
        ("import vllm", "not gpu and not slow", True),
        ("import vllm", "not slow", True),
        ("import vllm", "not gpu and slow", False),
        ("import vllm", "not slow or gpu", False),
        ("import vllm", "", False),
        ("import json", "not gpu and not slow", False),
    ],
)
def test_files_of_slow_tests_are_left_out_only_if_no_slow_test_is_asked_for(tmp_path, source, marks, left_out):
    path = tmp_path / "test_it.py"
    path.write_text(source)
    assert is_left_out(path, marks) == left_out
    assert not is_left_out(tmp_path, marks), "a folder"
