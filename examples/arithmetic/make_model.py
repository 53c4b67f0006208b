"""Makes the example's tokenizer and its untrained model, as a Hugging Face directory.

The tokenizer's vocabulary is fixed, not learned: special tokens, the words and numbers of the problems, and every
printable character, so that any ASCII text survives the round trip. It has 256 entries: each of two tensor-parallel
ranks holds 128 rows. Every sharded dimension of the model is a multiple of 128 per rank.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

VOCAB_SIZE = 256
PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
WORDS = ("user", "assistant", "system", "answer:", "plus", "minus", "is", "makes", "then")
SPACED_WORDS = ("plus", "minus", "is", "makes")
NUMBERS = range(20)
CHARACTERS = ["\n", *map(chr, range(32, 127))]
MAX_POSITIONS = 512
HIDDEN = 128

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> list[str]:
    """The `VOCAB_SIZE` tokens in the order of their ids; unused rows are reserved."""
    numbers = [str(number) for number in NUMBERS]
    tokens = [PAD, START, END, UNKNOWN, *CHARACTERS, *WORDS, *numbers]
    tokens += [f" {word}" for word in SPACED_WORDS] + [f" {number}" for number in numbers] + [" +", " -", " =", " :"]
    unique = list(dict.fromkeys(tokens))
    return unique + [f"<|reserved_{index}|>" for index in range(VOCAB_SIZE - len(unique))]


def make_tokenizer(out: Path, *, max_positions: int = MAX_POSITIONS) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`.

    A unigram model with one score per token prefers the fewest tokens; numbers, words and signs are split first, so
    that a token never spans two of them.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = vocabulary()
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=tokens.index(UNKNOWN)))
    pieces = Regex(r" ?[0-9]+| ?[A-Za-z]+:?| ?[^\sA-Za-z0-9]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = [token for token in tokens if token.startswith("<|")]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "bos_token": None,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def make_model(out: Path, *, seed: int) -> None:
    """Writes `config.json`, `generation_config.json` and the weights (float32) of a Qwen3-style model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokens = vocabulary()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=HIDDEN**-0.5,
        tie_word_embeddings=False,
        pad_token_id=tokens.index(PAD),
        bos_token_id=None,
        eos_token_id=tokens.index(END),
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(out)


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m examples.arithmetic.make_model --out DIR`."""
    parser = argparse.ArgumentParser(description="Make the arithmetic example's tokenizer and untrained model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    make_tokenizer(arguments.out)
    make_model(arguments.out, seed=arguments.seed)


if __name__ == "__main__":
    main()
