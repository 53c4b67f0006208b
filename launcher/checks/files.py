"""Checks data files and tokenizer files before a run starts; a bad row is named by file and line.

Only the structure of rows is checked. Token counts need the tokenizer and are checked when the prompts are loaded.

`tokenizer_problems` compares a fast tokenizer's file with its model without loading the tokenizer (and torch with it).
"""

import json
from contextlib import closing
from pathlib import Path

from pydantic import BaseModel, ValidationError

from rollout.config import DataConfig
from rollout.data.rows import raw_rows, read_rows, unreadable
from rollout.data.sft_rows import texts_of

KINDS = (".jsonl", ".parquet")


def training_files(data: DataConfig, *, groups_per_step: int) -> tuple[int, list[str]]:
    """Number of rows of the training files, and the problems of these files.

    Prompts that are too long only lower the number, so a run may still find too few of them when it has a tokenizer.
    """
    count, problems = 0, []
    for number, dataset in enumerate(data.train):
        num_rows, found = _prompt_rows(f"data.train.{number}.path", dataset.path)
        count += num_rows
        problems += found
    if not problems and (problem := few_prompts(count, groups_per_step=groups_per_step)):
        problems.append(problem)
    return count, problems


def few_prompts(count: int, *, groups_per_step: int) -> str:
    """The problem of training prompts that cannot fill a step; empty if they can."""
    if count >= groups_per_step:
        return ""
    return (
        f"a step may sample {groups_per_step} groups (`algorithm.prompts_per_step` x (1 + `algorithm.max_refill`)) "
        f"of {count} prompts in `data.train`: it would draw a prompt twice; lower them, or add prompts"
    )


def prompt_file(key: str, path: str, *, limit: int = 0) -> list[str]:
    """Problems of a file of prompts, or of its first `limit` rows if that is positive."""
    return _prompt_rows(key, path, limit=limit)[1]


def _prompt_rows(key: str, path: str, *, limit: int = 0) -> tuple[int, list[str]]:
    """Number of rows, 0 if they cannot be read, and the problems."""
    if problem := _file(key, path):
        return 0, [problem]
    try:
        return len(read_rows(path, limit=limit)), []
    except ValueError as error:
        return 0, [f"`{key}`: {error}"]


def sft_file(key: str, path: str) -> list[str]:
    """Problems of a file of prompts with responses."""
    if problem := _file(key, path):
        return [problem]
    try:
        with closing(raw_rows(path)) as rows:
            for where, values in rows:
                texts_of(values, where=where)
    except ValueError as error:
        return [f"`{key}`: {error}"]
    return []


def _file(key: str, path: str) -> str:
    """Problem of the path itself; empty if a file of a known kind is there."""
    try:
        is_file = Path(path).is_file()
    except OSError as error:
        return f"`{key}` = {unreadable(Path(path), error)}"
    if not is_file:
        return f"`{key}` = {path}: no such file (started in {Path.cwd()})"
    if Path(path).suffix not in KINDS:
        return f"`{key}` = {path}: {Path(path).suffix or 'no suffix'} is not supported; needs {' or '.join(KINDS)}"
    return ""


_JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


class _AddedToken(BaseModel):
    id: int


class _Vocabulary(BaseModel):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Ids by token, or (unigram) tokens with their scores in the order of their ids."""


class _TokenizerFile(BaseModel):
    """The part of `tokenizer.json` that holds ids; other keys are ignored."""

    model: _Vocabulary
    added_tokens: list[_AddedToken] = []

    def largest_id(self) -> int:
        """Largest token id; -1 if there is no token."""
        vocabulary = self.model.vocab
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        return max([*ids, *(token.id for token in self.added_tokens)], default=-1)


def broken_json(directory: Path) -> list[str]:
    """Problems of small files in a model directory that loaders read and that are no JSON objects."""
    problems = []
    for path in (directory / name for name in _JSON_FILES if (directory / name).exists()):
        try:
            if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                problems.append(f"{path} is not a JSON object; fetch it again")
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path} is not JSON ({error}); fetch it again")
    return problems


def tokenizer_problems(path: Path, vocab_size: int) -> list[str]:
    """Problems of the `tokenizer.json` at `path` with a model of `vocab_size` rows; none if there is no such file."""
    if not path.exists():
        return []
    try:
        largest = _TokenizerFile.model_validate_json(path.read_bytes()).largest_id()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        return [f"{path} is not a tokenizer's file: {reason}; fetch it again"]
    if largest < vocab_size:
        return []
    return [
        f"{path} has ids up to {largest}, but the model's vocab_size is {vocab_size}; "
        "use the tokenizer that the model was trained with, or resize the model's embeddings"
    ]
