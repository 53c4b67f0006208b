"""What is written reads back: texts stay texts, also those that look like numbers, and numbers stay numbers."""

import datetime
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.yaml_source import dump, parse_value, read
from launcher.errors import ConfigError

NUMBERLIKE = st.text(alphabet="0123456789eE+-._:xinfa", min_size=1, max_size=8)


@pytest.mark.parametrize("text", ["1e-6", "1E6", "08", "+.5", "1e3", "1.0e-6", "-.INF", ".nan", "1:00:00", "yes"])
def test_a_text_that_looks_like_a_number_is_written_in_quotes(text: str) -> None:
    assert dump({"key": text}) == f"key: '{text}'\n"


@given(st.one_of(NUMBERLIKE, st.text()))
def test_every_text_reads_back_as_a_text(text: str) -> None:
    values = {"value": text, "list": [text], "keys": {text: 1}}
    assert parse_value(dump(values)) == values


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("010", "010 begins with a zero, so YAML may read another number (010 is 8); write 10, or '010' in quotes"),
        ("-010", "write -10, or '-010' in quotes"),
        ("08", "write 8, or '08' in quotes"),
        ("+0_7", "write 7, or '+0_7' in quotes"),
        ("[1, 010]", "write 10,"),
        ("{a: 00}", "write 0, or '00' in quotes"),
        ("{010: a}", "write 10,"),
    ],
)
def test_a_number_with_a_leading_zero_is_refused(text: str, fix: str, tmp_path: Path) -> None:
    """PyYAML alone reads 010 as 8, and 08 as 8.0."""
    with pytest.raises(ConfigError, match=re.escape(fix)):
        parse_value(text)
    file = tmp_path / "run.yaml"
    file.write_text(f"model: m\nseed: {text}\n")
    with pytest.raises(ConfigError, match=rf"^{file}:2: .* begins with a zero"):
        read(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-0", 0), ("0.1", 0.1), ("10", 10), ("0o10", "0o10"), ("0x1f", 31), ("'010'", "010"), ("n010", "n010")],
)
def test_other_numbers_and_texts_with_zeros_are_read(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize("value", [1e-6, 1e16, 8, -3.5, float("inf"), True, None])
def test_every_number_reads_back_as_a_number(value: float | None) -> None:
    assert dump({"key": value}).count("'") == 0
    assert parse_value(dump({"key": value})) == {"key": value}


def test_keys_are_texts_as_they_are_written(tmp_path: Path) -> None:
    """PyYAML alone has a date, a number and a truth value as keys, which JSON does not have or writes otherwise."""
    table = "{2026-11-30: {1: a}, on: b, 0x1f: 2026-11-30}"
    keys = {"2026-11-30": {"1": "a"}, "on": "b", "0x1f": datetime.date(2026, 11, 30)}
    assert parse_value(table) == keys
    (tmp_path / "run.yaml").write_text(f"2026-11-30: {table}\n")
    assert read(tmp_path / "run.yaml").values == {"2026-11-30": keys}


def test_a_list_that_is_called_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a mapping node, but found sequence"):
        parse_value("!!map [1, 2]")


@pytest.mark.parametrize("text", ["2026-02-30", "!!float x", "!!int x", "!!bool x", "!!timestamp x", "[1, !!int '']"])
def test_a_scalar_that_is_not_what_it_looks_like_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a YAML value: line 1, column \d+: .* is no \w+ \(.*in quotes"):
        parse_value(text)
