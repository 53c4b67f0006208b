"""`megatron-rl doctor --log-probabilities` on a CUDA device: every format, and again after the engines have slept."""

from pathlib import Path

import pytest

from examples.arithmetic import make_data, make_model
from launcher.cli import main

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = """
model: {root}/model
run_dir: {root}/run
num_steps: 1
data: {{train: [{{path: {root}/data/train.jsonl}}], max_prompt_tokens: 96}}
sampling: {{max_response_tokens: 32}}
engine: {{bf16_first_layers: 0, bf16_last_layers: 0, max_num_seqs: 8, kv_cache_bytes: 1073741824}}
trainer: {{dtype: bf16}}
algorithm: {{prompts_per_step: 8}}
history: {{drafts: false}}
wandb: {{mode: disabled}}
"""


@pytest.mark.parametrize("sleep_level", [1, 2])
@pytest.mark.parametrize("format", ["bf16", "int8", "fp8_channel", "fp8_block"])
def test_log_probabilities_agree_before_and_after_a_sleep(
    format: str, sleep_level: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--train", "8", "--held-out", "8", "--warm-start", "8"]
    make_data.main(["--out", str(tmp_path / "data"), *sizes])
    make_model.main(["--out", str(tmp_path / "model")])
    (tmp_path / "run.yaml").write_text(CONFIG.format(root=tmp_path))
    turns = [f"engine.sleep_level={sleep_level}", "trainer.offload=all"]
    main(["doctor", str(tmp_path / "run.yaml"), f"engine.format={format}", *turns, "--log-probabilities"])
    lines = capsys.readouterr().out.splitlines()
    for name in ("trainer", "engines", "after sleep"):
        (line,) = [line for line in lines if line.removeprefix("ok").removeprefix("FAIL").strip().startswith(name)]
        assert line.startswith("ok"), line
