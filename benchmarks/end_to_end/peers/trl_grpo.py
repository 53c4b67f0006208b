"""TRL's GRPO on the benchmark's task.

`python -m benchmarks.end_to_end.peers.trl_grpo SETTINGS` runs in the environment of `trl_grpo.txt` and imports nothing
of this project but `task.py` beside it. TRL samples with `generate` of Transformers. Its vLLM mode does not run on a
CPU build of vLLM: the server mode sends weights over NCCL. The colocated mode calls `load_weights` on the loaded model,
which fails there, because kernels for CPUs have packed the weights and freed them. Chosen in TRL's favour:

* BF16 autocast is off, since FP32 is as fast for a model of this size; sampling uses the whole step as one batch.
* Token-level loss without a reference model, one optimizer step a batch, so no second pass for old log-probabilities.
* Sampling is `generate`. Continuous batching runs on a CPU, too, and took longer on a development seed.
* The first update has a learning rate above zero, as in the other stacks (`Trainer`).
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers import TrainingArguments as Arguments
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.end_to_end.peers import task


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """Rewards of a batch of conversations."""
    return [task.score(each[0]["content"], truth) for each, truth in zip(completions, answer, strict=True)]


class Watch(TrainerCallback):
    """Writes the result file, and saves weights."""

    def __init__(self, settings: task.Settings) -> None:
        self.settings = settings
        self.began = time.time()

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Note when the first step begins."""
        self.began = time.time()

    def on_step_end(
        self, args: Arguments, state: TrainerState, control: TrainerControl, *, model: PreTrainedModel, **_: object
    ) -> None:
        """Note the seconds of the step; save weights when it is due."""
        task.write_seconds(self.settings, state.global_step - 1, time.time() - self.began)
        task.save_if_due(self.settings, state.global_step, model)
        self.began = time.time()


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with the warm-up of the other stacks: update n has (n + 1) / `warmup_steps` of the learning rate.

    The schedules of Transformers begin with a rate of 0, so the first step would train nothing.
    """

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The schedule, which `train` asks for once."""
        warmup = max(1, int(self.args.warmup_steps))
        self.lr_scheduler: Any = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda update: min(1.0, (update + 1) / warmup)
        )
        return self.lr_scheduler


def main() -> None:
    """Train, write `metrics.jsonl`, and save weights."""
    settings = task.Settings.read(sys.argv[1])
    torch.set_num_threads(settings.threads)
    tokenizer = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    rows = [{"prompt": prompt.messages, "answer": prompt.answer} for prompt in task.prompts(settings.train)]
    samples = settings.prompts_per_step * settings.group_size
    accumulation = max(1, samples // settings.samples_at_once)
    config = GRPOConfig(
        output_dir=str(Path(settings.out) / "trl"),
        use_cpu=True,
        bf16=False,
        seed=settings.seed,
        max_steps=settings.num_steps,
        per_device_train_batch_size=samples // accumulation,
        gradient_accumulation_steps=accumulation,
        num_generations=settings.group_size,
        max_completion_length=settings.most_tokens,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch(settings)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
