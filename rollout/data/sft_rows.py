"""Loads the rows of supervised fine-tuning: prompts with their target responses.

Rows are `prompt` (text or chat messages) and `response` (text), in jsonl or parquet. The tokenizer's end-of-sequence
token is appended to each response, as in sampled responses. So a response is the bare text of one turn: one that is
blank, ends itself or holds turns is refused, because all its tokens would be learned.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from rollout.data.chat_template import ChatMessage
from rollout.data.prompts import render
from rollout.data.rows import prompt_of, raw_rows, whole_text
from rollout.data.tokenizer import Tokenizer, TokenizerSource, check_fits_model
from rollout.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRows:
    """Tokenised rows, in file order."""

    prompts: tuple[TokenIds, ...]
    """[P] each"""
    responses: tuple[TokenIds, ...]
    """[T] each, end-of-sequence token included."""

    def lengths(self) -> list[int]:
        """Prompt plus response tokens of each row."""
        return [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]


def load_sft_rows(path: str, source: TokenizerSource, *, max_tokens: int) -> SftRows:
    """Read and tokenise a file.

    Raises:
        ValueError: a row has the wrong shape, more than `max_tokens` tokens or a response that is not the bare text of
            one turn (the message names file and line), there is no row, or the tokenizer does not fit the model.
    """
    tokenizer = Tokenizer(source)
    facts = tokenizer.facts()
    check_fits_model(facts, source.directory)
    places, prompts, responses = [], [], []
    with closing(raw_rows(path)) as raw:
        for where, values in raw:
            prompt, response = texts_of(values, where=where)
            places.append(where)
            prompts.append(render(prompt, tokenizer, where=where))
            responses.append(_one_turn(response, tokenizer.turn_markers, where=where))
    if not places:
        raise ValueError(f"{path}: no rows")
    prompt_ids = tokenizer.encode(prompts, add_special_tokens=not tokenizer.has_chat_template)
    end = np.array([facts.eos_token_id], dtype=np.int32)
    response_ids = [np.concatenate([ids, end]) for ids in tokenizer.encode(responses, add_special_tokens=False)]
    for where, ids, target in zip(places, prompt_ids, response_ids, strict=True):
        if facts.eos_token_id in target[:-1]:
            raise ValueError(
                f"{where}: the response holds the end-of-sequence token, which is appended to each response; remove it"
            )
        if len(ids) + len(target) > max_tokens:
            raise ValueError(
                f"{where}: prompt and response have {len(ids) + len(target)} tokens, data.max_tokens is "
                f"{max_tokens}; raise it or shorten the row"
            )
    return SftRows(prompts=tuple(prompt_ids), responses=tuple(response_ids))


def texts_of(values: object, *, where: str) -> tuple[str | tuple[ChatMessage, ...], str]:
    """Prompt and response of a row.

    Raises:
        ValueError: one of them is missing, blank or of another kind, or holds half of a character; the message names
            `where`.
    """
    response = values.get("response") if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(response, str):
        raise ValueError(f"{where}: a row must be an object with `prompt` and `response` (text)")
    if not response.strip():
        raise ValueError(
            f"{where}: `response` is blank, so the model would learn to answer nothing; write it, or leave the row out"
        )
    return prompt_of(values, where=where), whole_text(response, where=where, column="`response`")


def _one_turn(response: str, markers: Sequence[str], *, where: str) -> str:
    """The response, if it holds none of the special tokens that the chat template writes around messages.

    One may stand at its end: a base model learns there how the template ends a turn, which is not its own end.
    """
    whole = response.rstrip()
    body = next((whole.removesuffix(marker) for marker in markers if whole.endswith(marker)), response)
    if found := next((marker for marker in markers if marker in body), ""):
        raise ValueError(
            f"{where}: the response holds {found}, which the chat template writes around a message, so it is already "
            "rendered; give the bare text of one turn, to which the end is appended, and earlier turns in `prompt`"
        )
    return response
