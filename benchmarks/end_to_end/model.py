"""Makes the benchmark's tokenizer and its untrained model of half a million parameters, as a Hugging Face directory.

The shape is that of the arithmetic example with heads of 32 and small MLPs, so that long answers are cheap to train on.
"""

from pathlib import Path

from examples.arithmetic.make_model import END, PAD, VOCAB_SIZE, make_tokenizer, vocabulary

CONTEXT = 2304
HIDDEN, FEED_FORWARD, LAYERS, HEADS, KEY_VALUE_HEADS = 128, 128, 4, 4, 2


def make(out: Path, *, seed: int) -> None:
    """Write tokenizer, `config.json`, `generation_config.json` and weights (float32) of a Qwen3-style model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_tokenizer(out, max_positions=CONTEXT)
    tokens = vocabulary()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=CONTEXT,
        initializer_range=HIDDEN**-0.5,
        tie_word_embeddings=False,
        pad_token_id=tokens.index(PAD),
        bos_token_id=None,
        eos_token_id=tokens.index(END),
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(out)
