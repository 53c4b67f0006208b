"""Log-probabilities of Hugging Face, trainer and engines agree; a wrong weight turns its own line red."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from launcher.checks.check import CheckedRun, check_run
from launcher.cluster.node import node_resources
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.doctor.log_probabilities import MAX_REFERENCE_GAP, compare_log_probabilities, trainer_line
from launcher.doctor.reference import reference_logprobs
from megatron_rl.controller.publisher import probe_tokens
from tests.support.engines.tiny_vllm_models import make_weights, save_checkpoint

CONFIG = """
model: {root}/model
run_dir: {root}/run
num_steps: 1
data: {{train: [{{path: {root}/train.jsonl}}], max_prompt_tokens: 64}}
sampling: {{max_response_tokens: 32}}
engine: {{format: int8, bf16_first_layers: 0, bf16_last_layers: 0, max_num_seqs: 8, kv_cache_bytes: 67108864}}
trainer: {{dtype: fp32}}
algorithm: {{prompts_per_step: 1}}
history: {{drafts: false}}
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> CheckedRun:
    root = tmp_path_factory.mktemp("doctor")
    save_checkpoint(root / "model", "qwen3", make_weights("qwen3", 1), "bf16")
    (root / "model" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 255}}, "added_tokens": []}')
    (root / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (root / "run.yaml").write_text(CONFIG.format(root=root))
    return check_run(load(RunConfig, str(root / "run.yaml"), []), [node_resources()])


def reference(checked: CheckedRun, directory: Path) -> np.ndarray:
    tokens = probe_tokens(checked.spec.vocab_size, checked.config.publish.probe_tokens)
    return reference_logprobs(str(directory), tokens, checked.config.trainer.dtype)


@pytest.mark.long
def test_hugging_face_trainer_and_engines_agree(checked: CheckedRun, running, tmp_path: Path) -> None:
    lines = {check.name: check for check in compare_log_probabilities(checked, tmp_path, running)}
    assert list(lines) == ["trainer", "engines"]
    assert not [str(line) for line in lines.values() if line.problem]


@pytest.mark.slow
def test_a_flipped_weight_is_a_red_line(checked: CheckedRun, tmp_path: Path) -> None:
    """The largest weight of an attention layer changes its sign."""
    model = Path(checked.config.model)
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("o_proj.weight"))
    flat = weights[name].view(-1)
    flat[flat.abs().argmax()] *= -1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    right, wrong = reference(checked, model), reference(checked, tmp_path)
    bound = MAX_REFERENCE_GAP["fp32"]
    assert trainer_line(right, right, bound=bound).problem == ""
    assert "do not train" in trainer_line(right, wrong, bound=bound).problem
