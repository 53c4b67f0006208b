"""Compares a loaded tokenizer with the `tokenizer.json` that it was loaded from, by a fixed text.

The text has what pre-tokenizers and decoders treat differently: runs of spaces, newlines, tabs, digits, capitals,
contractions, punctuation, accents, Chinese, Japanese and an emoji. Its characters are composed (NFC), because Qwen's
classes add that normalisation to files without it. It has no special tokens, because `tokenizer_config.json` may add
some that the file lacks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

TEXT = (
    "Solve  1 + 23 = 4567890 - 3.14159,\n\n   then\tit's WE'LL don't: {f(x): [y_1]}; // x²\r\n"
    "    return a != b  \n\nÀ la façon naïve, Größe; 解方程 12345，答案是３。 こんにちは — 한국어 🙂!\n \n"
)


class Encoded(Protocol):
    """Ids of some texts."""

    input_ids: list[list[int]]


class Loaded(Protocol):
    """The methods of `transformers`' tokenizers that this file uses."""

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Encoded:
        """The ids of each text, neither cut nor padded."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """The text of ids."""


def differs_from_file(loaded: Loaded, file: Path) -> str:
    """What a loaded tokenizer does with the text and `file` does not; empty if they agree or there is no such file."""
    if not file.is_file():
        return ""
    import tokenizers

    written = tokenizers.Tokenizer.from_file(str(file))
    written.no_truncation()
    written.no_padding()
    (ids,) = loaded([TEXT], add_special_tokens=False).input_ids
    expected = written.encode(TEXT, add_special_tokens=False).ids
    if ids != expected:
        pairs = enumerate(zip(ids, expected, strict=False))
        first = next((at for at, (one, other) in pairs if one != other), min(len(ids), len(expected)))
        return f"a text has {len(ids)} tokens and not {len(expected)}, the first other one is token {first}"
    text = loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    expected_text = written.decode(ids)
    return "" if text == expected_text else f"ids are decoded to {text[:20]!r} and not to {expected_text[:20]!r}"
