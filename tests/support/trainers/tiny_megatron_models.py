"""Tiny random Hugging Face models of every supported family, and packed forwards of them by transformers."""

import torch

VOCAB = 150
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {
    "head_dim": 32,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
VARIANTS = {
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE | {"norm_topk_prob": True}),
}
FAMILIES = tuple(VARIANTS)

VARIANTS["qwen3_moe_raw"] = (
    "Qwen3MoeConfig",
    MOE | {"norm_topk_prob": False, "num_experts": 5, "num_experts_per_tok": 3},
)
"""Probabilities of the chosen experts as they are."""

VARIANTS["wide"] = (
    "Qwen3Config",
    {
        "hidden_size": 160,
        "intermediate_size": 416,
        "head_dim": 40,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    },
)
"""Several blocks of 128 x 128 in most matrices, of which some are cut by every partition."""


VARIANTS["blocks"] = (
    "Qwen3Config",
    {
        "hidden_size": 256,
        "intermediate_size": 384,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    },
)
"""Whole blocks of 128 x 128 only, in Megatron's fused matrices as in single ones."""

VARIANTS["expert_blocks"] = (
    "Qwen3MoeConfig",
    VARIANTS["blocks"][1]
    | MOE
    | {"head_dim": 128, "num_experts": 8, "moe_intermediate_size": 128, "norm_topk_prob": True},
)
"""Experts of the 30B-A3B kind, also in whole blocks."""


def config_of(name):
    """Configuration of transformers."""
    import transformers  # here, because the ranks of the pool import this module and do not need it

    kind, own = VARIANTS[name]
    return getattr(transformers, kind)(**SHARED | own)


def save_model(name, directory, *, dtype=torch.float32, max_shard_size="5GB"):
    """A random model whose norms and biases differ from their neutral initial values."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(list(VARIANTS).index(name))
    model = AutoModelForCausalLM.from_config(config_of(name)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def reference_logits(directory, sequences):
    """FP32 logits [sum of lengths, VOCAB] of transformers, one sequence after another."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        return torch.cat([model(torch.as_tensor(ids, dtype=torch.int64)[None]).logits[0] for ids in sequences])


def one_by_one(tensors):
    """Splits experts that transformers stacks in memory; files and the table of names have separate experts."""
    found = {}
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found |= {f"{parent}.{expert}.gate_proj.weight": gate, f"{parent}.{expert}.up_proj.weight": up}
        elif leaf == "down_proj":
            found |= {f"{parent}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found
