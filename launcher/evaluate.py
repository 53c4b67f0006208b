"""`megatron-rl eval`: avg@k and pass@k of any Hugging Face directory, in BF16 engines."""

import json
from pathlib import Path

from launcher.bf16_evaluation import evaluate_directory
from launcher.config import EvalConfig
from launcher.processes import processes
from launcher.progress import RunProgress


def evaluate(config: EvalConfig) -> None:
    """Evaluate every set of `config`, print one line each and write `config.output` if it is named."""
    progress = RunProgress(0)
    with processes(config.cluster, num_actors=config.engine.num_engines + 1, log_dir=None) as running:
        rows = evaluate_directory(config, running, progress, step=0)
    progress.evaluation(rows)
    if config.output:
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([row.as_row() for row in rows], indent=1) + "\n", encoding="utf-8")
