"""`python -m tests.support.runs.expert_model SOURCE TARGET`: a random mixture of experts, otherwise shaped like a dense
Qwen3."""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    dense = json.loads((source / "config.json").read_text())
    dense = {key: value for key, value in dense.items() if key not in ("architectures", "model_type", "layer_types")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**dense, **EXPERTS)).to(torch.bfloat16)
    model.save_pretrained(target)


if __name__ == "__main__":
    main()
