"""A tiny model with a few likely next tokens, so that some drafts are accepted and some rejected."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.engines.tiny_vllm_models import in_format, make_weights, save_checkpoint


def peaked_weights() -> dict[str, torch.Tensor]:
    """Weights whose likeliest token is often the vocabulary's last."""
    weights = make_weights("qwen3", 1)
    weights["lm_head.weight"] *= 4
    weights["model.embed_tokens.weight"][:, 0] = 1
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][-1] = 0
    weights["lm_head.weight"][-1, 0] = 12
    return weights


def save_peaked(root: Path) -> Sequence[str]:
    """Save the model in BF16 and INT8 without end-of-sequence id; returns the arguments of
    `tests.support.engines.drafting_jobs`."""
    for format in ("bf16", "int8"):
        save_checkpoint(root / format, "qwen3", in_format(peaked_weights(), format), format)
        config = json.loads((root / format / "config.json").read_text())
        (root / format / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return str(root), str(root / "answers")
