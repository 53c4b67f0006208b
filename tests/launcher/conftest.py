"""A model directory and a configuration file that pass every check, to be broken one way at a time."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.environment import NodeResources

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


@pytest.fixture
def node() -> NodeResources:
    """Two cores, 16 GiB."""
    return NodeResources(cpu_cores=2, available_bytes=16 << 30, gpu_bytes=())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """What the checks look at of a Hugging Face directory; the weights are empty."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 255}}, "added_tokens": []}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


@pytest.fixture
def write_config(tmp_path: Path, model_dir: Path) -> Callable[[str], Path]:
    """Writes a small valid configuration plus further YAML lines; returns its path."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')

    def write(more: str = "") -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(
            f"model: {model_dir}\n"
            f"run_dir: {tmp_path / 'run'}\n"
            "num_steps: 3\n"
            f"data:\n  train:\n    - path: {tmp_path / 'train.jsonl'}\n  max_prompt_tokens: 64\n"
            "sampling:\n  max_response_tokens: 128\n"
            f"{more}"
        )
        return path

    return write
