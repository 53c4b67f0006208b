"""Loads the rows of supervised fine-tuning: prompts with their target responses.

Rows are `prompt` (text or chat messages) and `response` (text), in jsonl or parquet. The tokenizer's end-of-sequence
token is appended to each response, as in sampled responses.
"""

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from rollout.data.prompts import render
from rollout.data.rows import prompt_of, raw_rows
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
        ValueError: a row has the wrong shape or more than `max_tokens` tokens (the message names file and line), there
            is no row, or the tokenizer does not fit the model.
    """
    tokenizer = Tokenizer(source)
    facts = tokenizer.facts()
    check_fits_model(facts, source.directory)
    places, prompts, responses = [], [], []
    with closing(raw_rows(path)) as raw:
        for where, values in raw:
            if not isinstance(values, dict) or not isinstance(values.get("response"), str):
                raise ValueError(f"{where}: a row must be an object with `prompt` and `response` (text)")
            places.append(where)
            prompts.append(render(prompt_of(values, where=where), tokenizer, where=where))
            responses.append(values["response"])
    if not places:
        raise ValueError(f"{path}: no rows")
    prompt_ids = tokenizer.encode(prompts, add_special_tokens=not tokenizer.has_chat_template)
    end = np.array([facts.eos_token_id], dtype=np.int32)
    response_ids = [np.concatenate([ids, end]) for ids in tokenizer.encode(responses, add_special_tokens=False)]
    for where, prompt, response in zip(places, prompt_ids, response_ids, strict=True):
        if len(prompt) + len(response) > max_tokens:
            raise ValueError(
                f"{where}: prompt and response have {len(prompt) + len(response)} tokens, data.max_tokens is "
                f"{max_tokens}; raise it or shorten the row"
            )
    return SftRows(prompts=tuple(prompt_ids), responses=tuple(response_ids))
