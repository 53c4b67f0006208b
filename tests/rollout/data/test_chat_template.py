"""The chat template of a tokenizer: which one is used, and which templates and arguments are refused."""

from pathlib import Path

import pytest

from tests.support.byte_tokenizer import CHAT_TEMPLATE, tokenizer_in, write_byte_tokenizer

DATED = (
    '{% if date_string is not defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}'
    "<|system|>Today is {{ date_string }}<|end|>" + CHAT_TEMPLATE
)
"""As the one of Llama 3.2."""
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_template_that_writes_todays_date_needs_a_fixed_one(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template=DATED)
    with pytest.raises(ValueError, match=r"writes today's date.*set data\.chat_template_arguments\.date_string"):
        tokenizer_in(tmp_path)
    text = tokenizer_in(tmp_path, date_string="26 Jul 2024").render(MESSAGES)
    assert text == "<|system|>Today is 26 Jul 2024<|end|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    "template",
    [
        '{{ strftime_now("%Y") }}' + CHAT_TEMPLATE,
        '{{ strftime_now("%H:%M") }}{{ date_string }}' + CHAT_TEMPLATE,
        '{% if messages[0].role == "system" %}{{ strftime_now("%d") }}{% endif %}' + CHAT_TEMPLATE,
        '{% if messages[0].role != "system" %}{{ raise_exception("no") }}{% endif %}{{ strftime_now("%d") }}',
    ],
)
def test_a_date_that_no_argument_replaces_is_to_be_taken_out_of_the_template(tmp_path: Path, template: str) -> None:
    write_byte_tokenizer(tmp_path, chat_template=template)
    arguments = {"date_string": "x"} if "date_string" in template else {}
    with pytest.raises(ValueError, match=r"writes today's date.*write a fixed date into the template"):
        tokenizer_in(tmp_path, **arguments)


def test_a_clock_that_a_template_reads_and_does_not_show_is_no_reason_to_refuse_it(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template='{% set today = strftime_now("%d") %}' + CHAT_TEMPLATE)
    assert tokenizer_in(tmp_path).render(MESSAGES) == "<|user|>Hi<|end|><|assistant|>"


def test_of_several_templates_the_default_one_is_used(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template={"tool_use": "tools", "default": CHAT_TEMPLATE})
    several = tokenizer_in(tmp_path)
    assert several.has_chat_template and several.render(MESSAGES) == "<|user|>Hi<|end|><|assistant|>"
    (tmp_path / "one").mkdir()
    write_byte_tokenizer(tmp_path / "one", chat_template=CHAT_TEMPLATE)
    assert several.facts() == tokenizer_in(tmp_path / "one").facts()


def test_several_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template={"tool_use": CHAT_TEMPLATE, "rag": CHAT_TEMPLATE})
    with pytest.raises(ValueError, match="are named rag, tool_use; name one of them default"):
        tokenizer_in(tmp_path)


@pytest.mark.parametrize("name", ["add_generation_prompt", "messages", "tools", "tokenize", "strftime_now"])
def test_what_every_conversation_brings_is_no_argument(tmp_path: Path, name: str) -> None:
    write_byte_tokenizer(tmp_path, chat_template=f"{{% set seen = {name} %}}" + CHAT_TEMPLATE)
    with pytest.raises(ValueError, match=f"chat_template_arguments: '{name}' is set with every conversation"):
        tokenizer_in(tmp_path, **{name: False})
