"""A model directory and a configuration file that pass every check; each test breaks one thing."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cluster.node import NodeResources
from megatron_rl.model.spec import read_model_spec
from megatron_rl.weights.shards import hf_shapes

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
NUM_ROWS = 1024
"""Training prompts, more than a step of any test draws."""


@pytest.fixture
def node() -> NodeResources:
    """Two cores, 16 GiB."""
    return NodeResources(cpu_cores=2, available_bytes=16 << 30, gpu_bytes=())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A Hugging Face directory that passes the checks; its weight file is a header and a hole."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 255}}, "added_tokens": []}))
    write_weights(directory)
    return directory


def write_weights(directory: Path) -> None:
    """Safetensors of the model in `config.json`; the tensors are a hole without disk blocks."""
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, shape in hf_shapes(read_model_spec(directory)).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture
def write_config(tmp_path: Path, model_dir: Path) -> Callable[[str], Path]:
    """Writes a small valid configuration plus further YAML lines; returns its path."""
    rows = [f'{{"prompt": "{number} + 1", "answer": "{number + 1}"}}\n' for number in range(NUM_ROWS)]
    (tmp_path / "train.jsonl").write_text("".join(rows))

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
