"""Rows of supervised fine-tuning: prompts with their target responses."""

from pathlib import Path

import pytest

from rollout.data.sft_rows import load_sft_rows
from rollout.data.tokenizer import TokenizerSource
from tests.support.byte_tokenizer import write_byte_tokenizer

WHOLE = '{"prompt": "1 + 1", "response": "\\ud83d\\ude00"}'


@pytest.fixture
def source(tmp_path: Path) -> TokenizerSource:
    write_byte_tokenizer(tmp_path)
    return TokenizerSource(directory=str(tmp_path))


def test_the_end_of_sequence_follows_each_response(tmp_path: Path, source: TokenizerSource) -> None:
    (tmp_path / "rows.jsonl").write_text(WHOLE)
    rows = load_sft_rows(str(tmp_path / "rows.jsonl"), source, max_tokens=99)
    # one id a byte; the template adds <|user|>, <|end|> and the generation prompt
    assert ([len(ids) for ids in rows.prompts], rows.lengths()) == ([5 + 3], [5 + 3 + 4 + 1])
    assert rows.responses[0][-1] == 256, "<|end|>"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt": "q", "response": "caf\\ud83d"}', r"`response` holds \\ud83d, half of a character"),
        ('{"prompt": "q \\ud83d", "response": "1"}', r"`prompt` holds \\ud83d, half of a character"),
        ('{"prompt": "q", "response": 1}', "a row must be an object with `prompt` and `response`"),
        ("[1]", "a row must be an object with `prompt` and `response`"),
        ('{"prompt": "q", "response": ""}', "`response` is blank, so the model would learn to answer nothing"),
        ('{"prompt": "q", "response": " \\n "}', "`response` is blank, so the model would learn to answer nothing"),
        ('{"prompt": "q", "response": "3<|end|>"}', "the response holds the end-of-sequence token, which is appended"),
        ('{"prompt": "q", "response": "3<|end|>4<|end|>"}', r"the response holds <\|end\|>, which the chat template"),
        (
            '{"prompt": "q", "response": "3<|end|><|user|>2 + 2<|end|><|assistant|>4"}',
            r"the response holds <\|user\|>, which the chat template writes",
        ),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(
    tmp_path: Path, source: TokenizerSource, row: str, problem: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{WHOLE}\n{row}\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: {problem}"):
        load_sft_rows(str(tmp_path / "rows.jsonl"), source, max_tokens=99)


def test_text_of_a_base_model_without_chat_template_does_not_end_itself(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template=None)
    source, path = TokenizerSource(directory=str(tmp_path)), tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "response": "<|user|>3"}')
    (ids,) = load_sft_rows(str(path), source, max_tokens=99).responses
    assert (len(ids), ids[0], ids[-1]) == (3, 257, 256)
    path.write_text('{"prompt": "q", "response": "3<|end|>4"}')
    with pytest.raises(ValueError, match=r"line 1: the response holds the end-of-sequence token, which is appended"):
        load_sft_rows(str(path), source, max_tokens=99)


def test_a_response_may_hold_the_thoughts_of_a_model(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, model_vocab_size=262, more_special=("<think>", "</think>"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "response": "<think>1</think>2"}')
    rows = load_sft_rows(str(tmp_path / "rows.jsonl"), TokenizerSource(directory=str(tmp_path)), max_tokens=99)
    assert len(rows.responses[0]) == 4 + 1


def test_a_base_model_may_learn_how_the_chat_template_ends_a_turn(tmp_path: Path) -> None:
    """The template ends turns with another token than the model, as in Qwen2.5's base models."""
    template = "{% for m in messages %}<|user|>{{ m.content }}<|im_end|>{% endfor %}<|assistant|>"
    write_byte_tokenizer(tmp_path, chat_template=template, model_vocab_size=262, more_special=("<|im_end|>",))
    source, path = TokenizerSource(directory=str(tmp_path)), tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "response": "4<|im_end|>"}')
    (ids,) = load_sft_rows(str(path), source, max_tokens=99).responses
    assert len(ids) == 3 and ids[-1] == 256
    path.write_text('{"prompt": "q", "response": "4<|im_end|>5<|im_end|>"}')
    with pytest.raises(ValueError, match=r"line 1: the response holds <\|im_end\|>, which the chat template writes"):
        load_sft_rows(str(path), source, max_tokens=99)
