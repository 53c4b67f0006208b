"""Tiny Hugging Face models with random weights, and checkpoints that vLLM's own loader reads.

The quantiser here is independent of the product: five lines that follow the rule.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto import AutoModelForCausalLM

VOCABULARY = 256
END_ID = 2

_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": END_ID,
    "torch_dtype": "bfloat16",
}

FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "blocks": Qwen3Config(**_SIZES, head_dim=128, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(
        **_SIZES,
        head_dim=128,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
"""`blocks` is cut into whole blocks of 128 x 128 even by two ranks, without which vLLM takes no `fp8_block`, `experts`
by one."""


ROUTER = ".mlp.gate.weight"


def make_weights(family: str, seed: int) -> dict[str, torch.Tensor]:
    """Random bfloat16 weights under Hugging Face names, in layer order; a tied head is left out."""
    torch.manual_seed(seed)
    config = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        weights |= {one: part.detach().clone() for one, part in _one_by_one(name, tensor)}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def _one_by_one(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Stacked experts as separate tensors, as on the hub."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        halves = [(expert, half, part) for expert, both in enumerate(tensor) for half, part in enumerate(both.chunk(2))]
        return [(f"{parent}.{expert}.{('gate', 'up')[half]}_proj.weight", part) for expert, half, part in halves]
    if leaf == "down_proj":
        return [(f"{parent}.{expert}.down_proj.weight", part) for expert, part in enumerate(tensor)]
    return [(name, tensor)]


def in_format(weights: dict[str, torch.Tensor], format: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in `format`."""
    if format == "bf16":
        return dict(weights)
    quantised: dict[str, torch.Tensor] = {}
    for name, w in weights.items():
        matrix = ".layers." in name and w.ndim == 2 and not name.endswith(ROUTER)
        if matrix and format == "fp8_block":
            quantised[name], quantised[name + "_scale_inv"] = _in_blocks(w.float())
        elif matrix:
            largest = 127 if format == "int8" else 448
            scale = w.float().abs().amax(dim=1, keepdim=True) / largest
            codes = (w.float() / scale).clamp(-largest, largest)
            quantised[name] = codes.round().to(torch.int8) if format == "int8" else codes.to(torch.float8_e4m3fn)
            quantised[name + "_scale"] = scale
        else:
            quantised[name] = w
    return quantised


def _in_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (-(-n // 128) for n in w.shape)
    codes, scales = torch.empty_like(w), torch.empty(rows, columns)
    for i, j in ((i, j) for i in range(rows) for j in range(columns)):
        box = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        scales[i, j] = 2.0 ** math.ceil(math.log2(float(w[box].abs().max()) / 448))
        codes[box] = w[box] / scales[i, j]
    return codes.to(torch.float8_e4m3fn), scales


def save_checkpoint(directory: Path, family: str, tensors: dict[str, torch.Tensor], format: str) -> Path:
    """Write a model directory in the form of the hub."""
    directory.mkdir(parents=True)
    config = FAMILIES[family].to_dict()
    config["architectures"] = [type(FAMILIES[family]).__name__.replace("Config", "ForCausalLM")]
    routers = [name.removesuffix(".weight") for name in tensors if name.endswith(ROUTER)]
    if format == "fp8_block":
        blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        blocks["modules_to_not_convert"] = ["lm_head", *routers]
        config["quantization_config"] = {"quant_method": "fp8", **blocks}
    elif format != "bf16":
        number = {"num_bits": 8, "type": "int" if format == "int8" else "float", "symmetric": True}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if format == "int8" else "float-quantized",
            "ignore": ["lm_head", *routers],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**number, "strategy": "channel", "dynamic": False},
                    "input_activations": {**number, "strategy": "token", "dynamic": True},
                }
            },
        }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory
