"""A data file that this user may not read is a problem with the key, the path and the fix."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.checks.files import prompt_file, sft_file


@pytest.mark.parametrize("check", [prompt_file, sft_file])
@pytest.mark.parametrize("refused", ["is_file", "open"])  # of its folder, of itself
def test_a_file_without_rights_is_a_problem(
    check: Callable[[str, str], list[str]], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "2", "response": "2"}\n')
    assert not check("data.path", str(path))

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, refused, refuse)
    (problem,) = check("data.path", str(path))
    assert problem.startswith("`data.path`") and str(path) in problem
    assert problem.endswith("cannot be read (Permission denied); make it readable, or name another file")


def test_a_blank_response_is_a_problem_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "response": "2"}\n{"prompt": "1", "response": " "}\n')
    (problem,) = sft_file("data.path", str(path))
    assert problem.startswith(f"`data.path`: {path}, line 2: `response` is blank")


@pytest.mark.parametrize("check", [prompt_file, sft_file])
def test_half_of_a_character_is_a_problem_of_its_line(check: Callable[[str, str], list[str]], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "\\ud83d", "response": "\\ud83d"}\n')
    (problem,) = check("data.path", str(path))
    assert problem.startswith(f"`data.path`: {path}, line 1: ") and "half of a character" in problem
