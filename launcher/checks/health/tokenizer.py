"""Tokenizer and chat template: rendered prompts hold their messages, and survive encoding and decoding.

A chat template of another model family raises no error: its markers are then encoded as ordinary text, a token for
each piece. The check finds this by markers of the form `<|name|>` that are more than one token.

Texts are compared in Unicode's form NFC, because tokenizers (those of Qwen) bring every text into it.
"""

import re
import unicodedata
from collections.abc import Sequence

from rollout.data.prompts import render
from rollout.data.rows import PromptRow
from rollout.data.tokenizer import Tokenizer

MARKER = re.compile(r"<\|[^|<>\s]+\|>")
"""Markers of turns in the chat templates of Qwen, Llama and others."""


def tokenizer_line(tokenizer: Tokenizer, rows: Sequence[PromptRow]) -> tuple[str, list[str]]:
    """Value and problems, from the prompts of `rows`.

    Raises:
        ValueError: a prompt cannot be rendered.
    """
    problems: dict[str, str] = {}
    for row in rows:
        text = render(row.prompt, tokenizer, where=row.where)
        (ids,) = tokenizer.encode([text], add_special_tokens=False)
        contents = [row.prompt] if isinstance(row.prompt, str) else [message["content"] for message in row.prompt]
        decoded = unicodedata.normalize("NFC", tokenizer.decode(ids))
        for content in contents:
            stripped = content.strip()
            if stripped not in text:
                problems["template"] = (
                    f"{row.where}: the chat template drops the text of a message; use the model's own template"
                )
            elif unicodedata.normalize("NFC", stripped) not in decoded:
                problems["tokenizer"] = f"{row.where}: {_why_changed(content, tokenizer)}"
        written = set(MARKER.findall(text)) - set(MARKER.findall("".join(contents)))
        for marker in sorted(written):
            (pieces,) = tokenizer.encode([marker], add_special_tokens=False)
            if len(pieces) > 1:
                problems["marker"] = (
                    f"the chat template writes {marker}, which is {len(pieces)} tokens and not one; the template "
                    "belongs to another tokenizer, use the model's own"
                )
    return f"{len(rows)} prompts rendered, encoded and decoded", list(problems.values())


def _why_changed(content: str, tokenizer: Tokenizer) -> str:
    for token in sorted(token for token in tokenizer.added_tokens if token in content):
        if not tokenizer.decode(*tokenizer.encode([token], add_special_tokens=False)):
            return f"the text holds {token}, which the model reads as a special token; write it in another way"
    return "text changes by encoding and decoding; use the model's tokenizer"
