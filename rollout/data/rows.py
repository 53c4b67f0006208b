"""Reads the rows of a data set from a `.jsonl` or `.parquet` file and checks their shape.

Columns (as in common data sets)
* `prompt`: text, or chat messages `[{"role": ..., "content": ...}, ...]`
* ground truth: the first present of `reward_model.ground_truth`, `ground_truth`, `answer`; numbers, lists and objects
  become JSON text, decimals and dates of a `.parquet` file their digits; an empty text is refused for every reward
  function, since rows are read without knowing it
* `data_source`: text, optional; the data set's name where absent
* `extra_info`: any value, optional

These columns hold whole characters. Half of one (a lone surrogate, which JSON can escape) has no bytes in UTF-8, so
neither tokenizers nor files take it. Tools that cut texts by UTF-16 units leave it. Other columns are not read.

Every error names the file and the line (`.jsonl`, from 1) or row (`.parquet`, from 1).
"""

import datetime
import decimal
import json
import re
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rollout.data.chat_template import ChatMessage

RawRows = Generator[tuple[str, object], None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row, not tokenised."""

    where: str
    """File and line, for errors."""
    prompt: str | tuple[ChatMessage, ...]
    data_source: str
    """That of the row, or the name of its data set."""
    ground_truth: str
    extra_info_json: str


def read_rows(path: str, *, name: str = "", limit: int = 0) -> list[PromptRow]:
    """The rows of a file in order, only the first `limit` if it is positive; blank lines are skipped.

    `name` of the data set defaults to the stem of `path`.

    Raises:
        ValueError: the file is missing, of another kind or empty, or a row has the wrong shape.
    """
    rows: list[PromptRow] = []
    name = name or Path(path).stem
    with closing(raw_rows(path)) as raw:
        for where, values in raw:
            rows.append(_row(values, where=where, name=name))
            if len(rows) == limit:
                break
    if not rows:
        raise ValueError(f"{path}: holds no rows")
    return rows


def raw_rows(path: str) -> RawRows:
    """(file and line, row) of a jsonl or parquet file; close the generator when you stop early.

    Raises:
        ValueError: the file is missing or unreadable.
    """
    file = Path(path)
    try:
        is_file = file.is_file()
    except OSError as error:
        raise ValueError(unreadable(file, error)) from error
    if not is_file:
        raise ValueError(f"{path}: no such file")
    if file.suffix == ".jsonl":
        return _json_lines(file)
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    raise ValueError(f"{path}: ends with {file.suffix!r}; data sets are .jsonl or .parquet")


def _json_lines(file: Path) -> RawRows:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{file}, line {number}"
                    yield where, _json(line, where)
    except OSError as error:
        raise ValueError(unreadable(file, error)) from error


def _json(line: bytes, where: str) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def _parquet_rows(file: Path) -> RawRows:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a parquet file: {error}") from error
    number = 0
    try:
        for batch in batches:
            for values in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", values
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}, behind row {number}: the parquet file is corrupt: {error}") from error


def unreadable(file: Path, error: OSError) -> str:
    """A sentence about a file that cannot be read."""
    return f"{file}: cannot be read ({error.strerror}); make it readable, or name another file"


def _row(values: object, *, where: str, name: str) -> PromptRow:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: a row must be an object with `prompt` and a ground truth, not {_brief(values)}")
    source = values.get("data_source")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{where}: `data_source` {_brief(source)} must be text")
    return PromptRow(
        where=where,
        prompt=prompt_of(values, where=where),
        data_source=whole_text(source or name, where=where, column="`data_source`"),
        ground_truth=ground_truth_of(values, where=where),
        extra_info_json=_json_of(values.get("extra_info")),
    )


def _json_of(value: object) -> str:
    """The value as text, with escapes if it holds half of a character: only the reward function reads it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return json.dumps(value, default=str) if _HALF.search(text) else text


_HALF = re.compile("[\ud800-\udfff]")
"""Half of a character: a lone surrogate."""


def whole_text(text: str, *, where: str, column: str) -> str:
    """`text`, if it holds whole characters only.

    Raises:
        ValueError: it holds half of a character (a lone surrogate).
    """
    if half := _HALF.search(text):
        raise ValueError(
            f"{where}: {column} holds {ascii(half[0])[1:-1]}, half of a character that was cut in two (a lone "
            "surrogate); write the row anew from the uncut text, or leave it out"
        )
    return text


def prompt_of(values: Mapping[str, object], *, where: str) -> str | tuple[ChatMessage, ...]:
    """The `prompt` column of a row.

    Raises:
        ValueError: the column is neither text nor chat messages, or holds half of a character.
    """
    prompt = values.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return whole_text(prompt, where=where, column="`prompt`")
    if isinstance(prompt, list) and prompt:
        return tuple(_message(entry, where=where) for entry in prompt)
    columns = ", ".join(map(str, values))
    raise ValueError(
        f"{where}: `prompt` {_brief(prompt)} must be text or a list of chat messages, not empty; the row has {columns}"
    )


def _message(entry: object, *, where: str) -> ChatMessage:
    if isinstance(entry, dict):
        role, content = entry.get("role"), entry.get("content")
        if isinstance(role, str) and isinstance(content, str):
            whole_text(role + content, where=where, column="`prompt`")
            return ChatMessage(role=role, content=content)
    raise ValueError(f'{where}: chat message {_brief(entry)} must be {{"role": text, "content": text}}')


def ground_truth_of(values: Mapping[str, object], *, where: str) -> str:
    """The ground truth of a row as text.

    Raises:
        ValueError: it is missing, empty, bytes, or holds a number that is not finite or half of a character.
    """
    reward_model = values.get("reward_model")
    candidates = [
        reward_model.get("ground_truth") if isinstance(reward_model, dict) else None,
        values.get("ground_truth"),
        values.get("answer"),
    ]
    truth = next((value for value in candidates if value is not None), None)
    if truth is None:
        raise ValueError(f"{where}: no ground truth; give `answer`, `ground_truth` or `reward_model.ground_truth`")
    if isinstance(truth, str):
        if truth.strip():
            return whole_text(truth, where=where, column="the ground truth")
        raise ValueError(
            f"{where}: the ground truth {_brief(truth)} is empty; write the answer, or any text, such as `none`, if "
            "the reward function compares with nothing"
        )
    if isinstance(truth, decimal.Decimal):
        return format(truth, "f")
    if isinstance(truth, datetime.date | datetime.time | datetime.timedelta):
        return str(truth)
    if isinstance(truth, bytes):
        raise ValueError(f"{where}: the ground truth {_brief(truth)} is bytes; write the column as text")
    try:
        text = json.dumps(truth, default=str, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"{where}: the ground truth {_brief(truth)} holds a number that is not finite; write the answer, or leave "
            "the row out"
        ) from error
    return whole_text(text, where=where, column="the ground truth")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
