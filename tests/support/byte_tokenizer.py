"""A byte-level tokenizer with a chat template, as a Hugging Face directory: one id a byte, so tests can count."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.data.tokenizer import Tokenizer, TokenizerSource

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_byte_tokenizer(
    directory: Path,
    *,
    chat_template: str | dict[str, str] | None = CHAT_TEMPLATE,
    eos: bool = True,
    model_vocab_size: int = 260,
    more_special: Sequence[str] = (),
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*SPECIAL, *more_special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>" if eos else None)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": model_vocab_size}))


def tokenizer_in(directory: str | Path, **template_arguments: str | float | bool) -> Tokenizer:
    return Tokenizer(TokenizerSource(directory=str(directory), template_arguments=template_arguments))
