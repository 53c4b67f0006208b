"""The tokenizer of a Hugging Face directory: chat template, ids, text, and the check that it fits the model.

`transformers` (and with it torch) is imported when a tokenizer is loaded, so processes that only name these types stay
small. A mismatch between tokenizer and model raises no error by itself, since wrong ids are still ids, and ruins a
run. Therefore it is checked before other processes start.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, cast

import numpy as np

from rollout.types import TokenIds


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """Facts of a tokenizer for other processes."""

    fingerprint: str
    """Hash of all that maps text to ids and back."""
    vocab_size: int
    """Largest id + 1."""
    eos_token_id: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """Where a tokenizer is loaded from, and how it renders conversations."""

    directory: str
    """A Hugging Face directory."""
    template_arguments: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Arguments of the chat template, by name: `enable_thinking`."""


class _Encoding(Protocol):
    input_ids: list[list[int]]


class _HubTokenizer(Protocol):
    """The methods of `transformers`' tokenizers that this file uses."""

    chat_template: str | None
    eos_token_id: int | None
    special_tokens_map: dict[str, object]

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[ChatMessage],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **template_arguments: str | float | bool,
    ) -> str: ...

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> _Encoding: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Tokenizer:
    """A loaded tokenizer."""

    def __init__(self, source: TokenizerSource) -> None:
        """Load from a Hugging Face directory.

        Raises:
            ValueError: the directory holds no tokenizer, or its chat template does not read an argument of `source`.
        """
        from transformers import AutoTokenizer

        try:
            self._hub = cast(_HubTokenizer, AutoTokenizer.from_pretrained(source.directory, local_files_only=True))
        except (OSError, ValueError) as error:
            raise ValueError(f"model: cannot load a tokenizer from {source.directory}: {error}") from error
        self._directory = source.directory
        self._arguments = source.template_arguments
        self._refuse_unread_arguments()

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer can render conversations."""
        return bool(self._hub.chat_template)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """A conversation as text, generation prompt included.

        Raises:
            ValueError: there is no chat template, or the template refuses the conversation.
        """
        if not self.has_chat_template:
            raise ValueError(
                f"the tokenizer in {self._directory} has no chat template; add one, or give prompts as plain text"
            )
        from jinja2 import TemplateError

        try:
            return self._hub.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._arguments
            )
        except TemplateError as error:
            raise ValueError(f"the chat template in {self._directory} refuses the conversation: {error}") from error

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenIds]:
        """Ids of each text, [P] each; rendered conversations already contain their special tokens."""
        if not texts:
            return []
        encoded = self._hub(list(texts), add_special_tokens=add_special_tokens).input_ids
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def decode(self, token_ids: TokenIds) -> str:
        """Text of [T] ids, without special tokens."""
        return self._hub.decode(token_ids.tolist(), skip_special_tokens=True)

    def facts(self) -> TokenizerFacts:
        """Facts for other processes.

        Raises:
            ValueError: the tokenizer has no end-of-sequence token.
        """
        if self._hub.eos_token_id is None:
            raise ValueError(
                f"model: the tokenizer in {self._directory} has no end-of-sequence token, so no response would ever "
                "end; set eos_token in tokenizer_config.json"
            )
        vocabulary = self._hub.get_vocab()
        return TokenizerFacts(
            fingerprint=self._fingerprint(vocabulary),
            vocab_size=max(vocabulary.values()) + 1,
            eos_token_id=self._hub.eos_token_id,
            has_chat_template=self.has_chat_template,
        )

    def _fingerprint(self, vocabulary: dict[str, int]) -> str:
        backend = getattr(self._hub, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else ""
        special = json.dumps({key: str(value) for key, value in self._hub.special_tokens_map.items()}, sort_keys=True)
        arguments = json.dumps(dict(self._arguments), sort_keys=True)
        parts = (json.dumps(sorted(vocabulary.items())), rules, special, self._hub.chat_template or "", arguments)
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()

    def _refuse_unread_arguments(self) -> None:
        """Jinja ignores an argument that a template does not read, so a misspelt one would change nothing."""
        for name in self._arguments:
            if not re.search(rf"\b{re.escape(name)}\b", self._hub.chat_template or ""):
                raise ValueError(
                    f"chat_template_arguments: the chat template in {self._directory} does not read {name!r}; "
                    "correct the name, or remove it"
                )


def check_fits_model(facts: TokenizerFacts, directory: str) -> None:
    """Refuse a tokenizer with ids that the model in `directory` lacks.

    Raises:
        ValueError: names both limits.
    """
    config = _read_json(Path(directory) / "config.json")
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ValueError(f"model: {directory}/config.json has no vocab_size")
    if facts.vocab_size > vocab_size:
        raise ValueError(
            f"model: the tokenizer in {directory} has ids up to {facts.vocab_size - 1}, but the model's vocab_size is "
            f"{vocab_size}; use the tokenizer that the model was trained with, or resize the model's embeddings"
        )


def _read_json(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    return cast(dict[str, object], json.loads(path.read_text()))
