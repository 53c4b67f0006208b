"""What is written reads back: texts stay texts, also those that look like numbers, and numbers stay numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.yaml_source import dump, parse_value

NUMBERLIKE = st.text(alphabet="0123456789eE+-._:xinfa", min_size=1, max_size=8)


@pytest.mark.parametrize("text", ["1e-6", "1E6", "08", "+.5", "1e3", "1.0e-6", "-.INF", ".nan", "1:00:00", "yes"])
def test_a_text_that_looks_like_a_number_is_written_in_quotes(text: str) -> None:
    assert dump({"key": text}) == f"key: '{text}'\n"


@given(st.one_of(NUMBERLIKE, st.text()))
def test_every_text_reads_back_as_a_text(text: str) -> None:
    values = {"value": text, "list": [text], "keys": {text: 1}}
    assert parse_value(dump(values)) == values


@pytest.mark.parametrize("value", [1e-6, 1e16, 8, -3.5, float("inf"), True, None])
def test_every_number_reads_back_as_a_number(value: float | None) -> None:
    assert dump({"key": value}).count("'") == 0
    assert parse_value(dump({"key": value})) == {"key": value}
