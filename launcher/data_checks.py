"""Reads data files the way the run will, before it starts: one bad row is named by file and line, not met in step 40.

Only the rows' shape is judged; token counts need the tokenizer and are checked when the prompts are loaded.
"""

from contextlib import closing
from pathlib import Path

from rollout.prompt_rows import prompt_of, raw_rows, read_rows

KINDS = (".jsonl", ".parquet")


def prompt_file(key: str, path: str, *, limit: int = 0) -> list[str]:
    """Problems of a file of prompts, or of its first `limit` rows if that is positive."""
    if problem := _file(key, path):
        return [problem]
    try:
        read_rows(path, limit=limit)
    except ValueError as error:
        return [f"`{key}`: {error}"]
    return []


def imitation_file(key: str, path: str) -> list[str]:
    """Problems of a file of prompts with responses."""
    if problem := _file(key, path):
        return [problem]
    try:
        with closing(raw_rows(path)) as found:
            for where, values in found:
                if not isinstance(values, dict) or not isinstance(values.get("response"), str):
                    return [f"`{key}`: {where}: a row must be an object with `prompt` and `response` (text)"]
                prompt_of(values, where=where)
    except ValueError as error:
        return [f"`{key}`: {error}"]
    return []


def _file(key: str, path: str) -> str:
    """What is wrong with the file itself; empty if nothing is."""
    if not Path(path).is_file():
        return f"`{key}` = {path}: no such file (started in {Path.cwd()})"
    if Path(path).suffix not in KINDS:
        return f"`{key}` = {path}: {Path(path).suffix or 'no suffix'} is not read; needs {' or '.join(KINDS)}"
    return ""
