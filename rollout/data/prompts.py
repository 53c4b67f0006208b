"""Loads files of prompts: rows are rendered through the chat template and tokenised.

Chat messages go through the tokenizer's chat template with a generation prompt. Plain text is one user turn where the
tokenizer has a template; a base model without one gets the text as it is. Text that holds a special token which the
template writes next to a message is already rendered and refused: it would become a turn within a turn.

A prompt's id is `DATASET/ROW`, with rows counted from 0 in file order, so it stays the same when other rows are
dropped.

Over-long prompts are refused (naming the first), dropped, or truncated from the left, and counted. Silent truncation
would train on questions without their beginning.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from rollout.data.chat_template import ChatMessage
from rollout.data.rows import PromptRow, read_rows
from rollout.data.tokenizer import Tokenizer
from rollout.types import Prompt, PromptId, TokenIds

Overlong = Literal["refuse", "drop", "truncate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPrompts:
    """The prompts of one file, with counts of those that were too long."""

    name: str
    prompts: tuple[Prompt, ...]
    num_dropped: int
    num_truncated: int

    def contents(self) -> str:
        """Hash of all prompts' tokens, in file order; equal on all machines."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            digest.update(len(prompt.token_ids).to_bytes(8, "little"))
            digest.update(prompt.token_ids.astype("<i4").tobytes())
        return digest.hexdigest()

    def answers(self) -> str:
        """Hash of what a reward function receives with each prompt, in file order; equal on all machines."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            for text in (prompt.ground_truth, prompt.data_source, prompt.extra_info_json):
                encoded = text.encode()
                digest.update(len(encoded).to_bytes(8, "little"))
                digest.update(encoded)
        return digest.hexdigest()

    def num_repeated(self, *, with_extra_info: bool = False) -> int:
        """Number of prompts with the tokens, ground truth and data source of an earlier one.

        `with_extra_info`: only of those whose `extra_info`, which reward functions receive, is equal, too. It needs
        memory of 16 bytes a prompt.
        """
        digests = bytearray()
        for prompt in self.prompts:
            extra_info = prompt.extra_info_json if with_extra_info else ""
            told = repr((prompt.ground_truth, prompt.data_source, extra_info))
            digest = hashlib.blake2b(told.encode(), digest_size=16)
            digest.update(b"\0")  # stands in no `repr`
            digest.update(prompt.token_ids.astype("<i4").tobytes())
            digests += digest.digest()
        in_order = np.frombuffer(digests, dtype="S16")
        in_order.sort()
        return int(np.count_nonzero(in_order[1:] == in_order[:-1]))


class PromptLoader:
    """Loads prompts with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def load(
        self, path: str, *, max_prompt_tokens: int, name: str = "", overlong: Overlong = "refuse", limit: int = 0
    ) -> LoadedPrompts:
        """Read, render and tokenise a file; `name` defaults to its stem, `limit` 0 means all rows.

        Raises:
            ValueError: names file and line of a row of the wrong shape, of a prompt that `render` refuses, or of one
                that is too long (`refuse`); or all prompts are too long (`drop`).
        """
        name = name or Path(path).stem
        rows = read_rows(path, name=name, limit=limit)
        ids = self._tokenise(rows)
        long = [index for index, token_ids in enumerate(ids) if len(token_ids) > max_prompt_tokens]
        if long and overlong == "refuse":
            first = rows[long[0]]
            raise ValueError(
                f"{first.where}: prompt has {len(ids[long[0]])} tokens, max_prompt_tokens is {max_prompt_tokens} "
                f"({len(long)} of {len(rows)} prompts are too long); raise it, or remove them (for training data, "
                "data.overlong_prompts can be drop or truncate)"
            )
        dropped = set(long) if overlong == "drop" else set()
        if len(dropped) == len(rows):
            raise ValueError(
                f"{path}: all {len(rows)} prompts have more than max_prompt_tokens {max_prompt_tokens} tokens"
            )
        return LoadedPrompts(
            name=name,
            prompts=tuple(
                _prompt(row, token_ids[-max_prompt_tokens:], prompt_id=PromptId(f"{name}/{index}"))
                for index, (row, token_ids) in enumerate(zip(rows, ids, strict=True))
                if index not in dropped
            ),
            num_dropped=len(dropped),
            num_truncated=len(long) if overlong == "truncate" else 0,
        )

    def _tokenise(self, rows: list[PromptRow]) -> list[TokenIds]:
        texts = [render(row.prompt, self._tokenizer, where=row.where) for row in rows]
        ids = self._tokenizer.encode(texts, add_special_tokens=not self._tokenizer.has_chat_template)
        for row, token_ids in zip(rows, ids, strict=True):
            if not len(token_ids):
                raise ValueError(f"{row.where}: the prompt has no tokens")
        return ids


def render(prompt: str | tuple[ChatMessage, ...], tokenizer: Tokenizer, *, where: str) -> str:
    """A row's prompt as the model gets it; with a chat template, plain text becomes a user's message.

    Raises:
        ValueError: the chat template is missing or refuses the prompt, or turns would stand within turns; the message
            names `where`.
    """
    if isinstance(prompt, str) and not tokenizer.has_chat_template:
        return prompt
    messages = [ChatMessage(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
    try:
        text = tokenizer.render(messages)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if problem := _nested(messages, text, tokenizer.turn_markers):
        raise ValueError(f"{where}: {problem}")
    return text


def _nested(messages: Sequence[ChatMessage], text: str, markers: Sequence[str]) -> str:
    """Why turns stand within turns of the rendered `text`; empty for a sound conversation."""
    for message in messages:
        if found := next((marker for marker in markers if marker in message["content"]), ""):
            return (
                f"the prompt holds {found}, which the chat template writes around a message, so the prompt is already "
                "rendered; give chat messages, or the bare question"
            )
    last = messages[-1]["content"].strip()
    if messages[-1]["role"] == "assistant" and not (last and text.rstrip().endswith(last)):
        return (
            "the last message is the assistant's, and the chat template does not leave it open; end with a user's "
            "message, and write the beginning of all responses into the template"
        )
    return ""


def _prompt(row: PromptRow, token_ids: TokenIds, *, prompt_id: PromptId) -> Prompt:
    token_ids.flags.writeable = False
    return Prompt(
        prompt_id=prompt_id,
        data_source=row.data_source,
        token_ids=token_ids,
        ground_truth=row.ground_truth,
        extra_info_json=row.extra_info_json,
    )
