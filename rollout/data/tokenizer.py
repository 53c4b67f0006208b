"""The tokenizer of a Hugging Face directory: chat template, ids, text, and the check that it fits the model.

`transformers` (and with it torch) is imported when a tokenizer is loaded, so processes that only name these types stay
small. A mismatch between tokenizer and model raises no error by itself, since wrong ids are still ids, and ruins a
run. Therefore it is checked before other processes start.

`transformers` rebuilds normalizer, pre-tokenizer and decoder from the class that a directory declares, and not from its
`tokenizer.json`. Where the two differ, `tokenizer.json` counts, because the model was trained with it
(`rollout.data.tokenizer_file`). Engines see token ids only and load no tokenizer.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from rollout.data.chat_template import Argument, ChatMessage, ChatTemplate, Renderer
from rollout.data.tokenizer_file import Loaded, differs_from_file
from rollout.types import TokenIds

_log = logging.getLogger(__name__)

_MARKER = re.compile(r"(?!</?[^\W_]+>$)[<\[\]{|]\S+[>\]\[}|]")
"""Forms of markers: `<|im_start|>`, `<start_of_turn>`, `[INST]`. Ordinary text may hold tags: `<s>`, `<think>`."""
_TEXTS_AT_ONCE = 4096
"""`transformers` keeps ids as Python objects, with masks and offsets, until a call returns: much for a million rows."""
_QUESTION = "Where does this question stand?"
"""A user's message that no chat template writes by itself."""


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
    template_arguments: Mapping[str, Argument] = field(default_factory=dict)
    """Arguments of the chat template, by name: `enable_thinking`."""


class _HubTokenizer(Renderer, Loaded, Protocol):
    """The methods of `transformers`' tokenizers that this file uses."""

    eos_token_id: int | None
    special_tokens_map: dict[str, object]

    def get_vocab(self) -> dict[str, int]: ...

    def get_added_vocab(self) -> dict[str, int]: ...


class Tokenizer:
    """A loaded tokenizer."""

    def __init__(self, source: TokenizerSource) -> None:
        """Load from a Hugging Face directory.

        Raises:
            ValueError: the directory holds no tokenizer, or none that can be loaded as its `tokenizer.json` says, or a
                chat template is refused (`rollout.data.chat_template.ChatTemplate`).
        """
        self._hub = _load(source.directory)
        self._directory = source.directory
        self._arguments = source.template_arguments
        self._template = ChatTemplate(self._hub, source.template_arguments, directory=source.directory)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer can render conversations."""
        return bool(self._template.text)

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """Texts that are one token each, wherever they stand: special tokens, and others such as `<think>`."""
        return frozenset(self._hub.get_added_vocab())

    @cached_property
    def turn_markers(self) -> tuple[str, ...]:
        """The added tokens next to a user's message in the chat template, at most one before it and one behind it.

        Text that holds one of them is already rendered. Empty without a template or such tokens.
        """
        try:
            text = self.render([ChatMessage(role="user", content=_QUESTION)])
        except ValueError:  # no template, or one for other conversations
            return ()
        before, question, behind = text.partition(_QUESTION)
        if not question:
            return ()
        markers = [token for token in self.added_tokens if _MARKER.fullmatch(token)]
        opening = sorted((marker for marker in markers if marker in before), key=before.rfind)[-1:]
        closing = sorted((marker for marker in markers if marker in behind), key=behind.find)[:1]
        return (*opening, *closing)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """A conversation as text, generation prompt included.

        Raises:
            ValueError: there is no chat template, or the template refuses the conversation.
        """
        return self._template.render(messages)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenIds]:
        """Ids of each text, [P] each; rendered conversations already contain their special tokens."""
        encoded: list[TokenIds] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            some = list(texts[start : start + _TEXTS_AT_ONCE])
            ids = self._hub(some, add_special_tokens=add_special_tokens).input_ids
            encoded += [np.asarray(each, dtype=np.int32) for each in ids]
        return encoded

    def decode(self, token_ids: TokenIds) -> str:
        """Text of [T] ids, without special tokens; spaces stay, also where `tokenizer_config.json` has them removed."""
        return self._hub.decode(token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)

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
        parts = (json.dumps(sorted(vocabulary.items())), rules, special, self._template.text, arguments)
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()


def _load(directory: str) -> _HubTokenizer:
    """The tokenizer of a directory, as its `tokenizer.json` says if there is one.

    Raises:
        ValueError: there is none, or no class of `transformers` gives the ids and texts of `tokenizer.json`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        declared = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if not isinstance(declared, PreTrainedTokenizerFast):  # it does not read the file
            return cast(_HubTokenizer, declared)
        file = Path(directory) / "tokenizer.json"
        declared_differs = differs_from_file(cast(Loaded, declared), file)
        if not declared_differs:
            return cast(_HubTokenizer, declared)
        plain = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: cannot load a tokenizer from {directory}: {error}") from error
    if plain_differs := differs_from_file(cast(Loaded, plain), file):
        raise ValueError(
            f"model: transformers loads another tokenizer than {file} ({plain_differs}), because of other files in "
            f"{directory}; fetch the directory again"
        )
    _log.warning(
        "%s is used; AutoTokenizer would replace it by %s: %s. Whatever serves the model must use the file, too",
        file,
        type(declared).__name__,
        declared_differs,
    )
    return cast(_HubTokenizer, plain)


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
