"""TRL's GRPO on the benchmark's task.

`python -m benchmarks.end_to_end.peers.trl_grpo SETTINGS` runs in the environment of `trl_grpo.txt` and imports nothing
of this project but `task.py` beside it. TRL samples with `generate` of Transformers. Its vLLM mode does not run on a
CPU build of vLLM: the server mode sends weights over NCCL. The colocated mode calls `load_weights` on the loaded model,
which fails there, because kernels for CPUs have packed the weights and freed them. Chosen in TRL's favour:

* BF16 autocast is off, since FP32 is as fast for a model of this size; sampling uses the whole step as one batch.
* Token-level loss without a reference model, one optimizer step a batch, so no second pass for old log-probabilities.
* Evaluation samples all held-out prompts as one batch.
"""

import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
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
    """Evaluates, and writes the result files."""

    def __init__(self, settings: task.Settings, tokenizer: PreTrainedTokenizerFast) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.held_out = task.prompts(settings.held_out)[: settings.num_held_out]
        self.began = time.time()

    def on_train_begin(
        self, args: Arguments, state: TrainerState, control: TrainerControl, *, model: PreTrainedModel, **_: object
    ) -> None:
        """Evaluate the first weights."""
        self.evaluate(0, model)
        self.began = time.time()

    def on_step_end(
        self, args: Arguments, state: TrainerState, control: TrainerControl, *, model: PreTrainedModel, **_: object
    ) -> None:
        """Note the seconds of the step; evaluate when it is due."""
        task.write_seconds(self.settings, state.global_step - 1, time.time() - self.began)
        if state.global_step % self.settings.evaluate_every == 0:
            self.evaluate(state.global_step, model)
        self.began = time.time()

    @torch.no_grad()
    def evaluate(self, finished: int, model: PreTrainedModel) -> None:
        """Sample one response to each held-out prompt."""
        began = time.time()
        ids = [task.prompt_ids(self.tokenizer, prompt) for prompt in self.held_out]
        longest = max(map(len, ids))
        pad = self.tokenizer.pad_token_id
        inputs = torch.tensor([[pad] * (longest - len(each)) + each for each in ids])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in ids])
        model.eval()
        outputs = model.generate(
            input_ids=inputs,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.settings.most_held_out_tokens,
        )
        model.train()
        texts = self.tokenizer.batch_decode(outputs[:, longest:], skip_special_tokens=True)
        rewards = [task.score(text, prompt.answer) for text, prompt in zip(texts, self.held_out, strict=True)]
        task.write_evaluation(self.settings, finished, rewards, began)


def main() -> None:
    """Train, and write `metrics.jsonl` and `evaluation.jsonl`."""
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
        lr_scheduler_type="constant_with_warmup",
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
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch(settings, tokenizer)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
