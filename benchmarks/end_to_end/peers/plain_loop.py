"""A plain GRPO loop around stock vLLM and Hugging Face, as a user would write it in an afternoon. One process.

`python -m benchmarks.end_to_end.peers.plain_loop SETTINGS` runs in the environment of `plain_loop.txt` and imports
nothing of this project but `task.py` beside it. Chosen in favour of the loop:

* vLLM runs in process, with its own sampler and batches, a whole step at once; weights are reloaded from memory.
* The trainer packs by length, skips groups of equal rewards, and uses one optimizer step, so it needs no second pass.
* `threads` are used by both in turn: sampling and training never run at the same time.
"""

import os
import random
import sys
import time
from collections.abc import Iterator

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch
from vllm import LLM, SamplingParams

from benchmarks.end_to_end.peers import task


class Loop:
    """Model, optimizer and engine."""

    def __init__(self, settings: task.Settings) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.settings = settings
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model)
        self.llm = LLM(
            model=settings.model,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=settings.context,
            max_num_seqs=settings.most_requests,
            kv_cache_memory_bytes=settings.kv_cache_bytes,
            logprobs_mode="processed_logprobs",
            seed=settings.seed,
        )
        self.model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def sample(self, rows: list[task.Prompt], count: int) -> list[list[task.Response]]:
        """`count` responses to each prompt."""
        prompts = [{"prompt_token_ids": task.prompt_ids(self.tokenizer, row)} for row in rows]
        limit = self.settings.most_tokens
        params = SamplingParams(n=count, temperature=1.0, max_tokens=limit, logprobs=0, detokenize=False)
        groups = []
        for row, output in zip(rows, self.llm.generate(prompts, params, use_tqdm=False), strict=True):
            group = []
            for each in output.outputs:
                logprobs = [entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs, strict=True)]
                reward = task.score(self.tokenizer.decode(each.token_ids, skip_special_tokens=True), row.answer)
                group.append(
                    task.Response(
                        prompt_ids=output.prompt_token_ids, ids=list(each.token_ids), logprobs=logprobs, reward=reward
                    )
                )
            groups.append(group)
        return groups

    def train(self, groups: list[list[task.Response]], step: int) -> None:
        """One optimizer step: GRPO, token mean, truncated importance weights against the engine's log-probabilities."""
        samples = [(sample, advantage) for group in groups for sample, advantage in task.advantages(group)]
        num_tokens = sum(len(sample.ids) for sample, _ in samples)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(1.0, (step + 1) / self.settings.warmup_steps)
        self.optimizer.zero_grad()
        for batch in task.micro_batches(samples, self.settings.micro_batch_tokens):
            self._backward(batch, num_tokens)
        if samples:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def _backward(self, batch: list[tuple[task.Response, float]], num_tokens: int) -> None:
        longest = max(len(sample.prompt_ids) + len(sample.ids) for sample, _ in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask, old, advantages = (torch.zeros((len(batch), longest - 1)) for _ in range(3))
        for row, (sample, advantage) in enumerate(batch):
            start, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.ids)
            ids[row, :end] = torch.tensor([*sample.prompt_ids, *sample.ids])
            mask[row, start - 1 : end - 1] = 1.0
            old[row, start - 1 : end - 1] = torch.tensor(sample.logprobs)
            advantages[row] = advantage
        # padding is on the right: with causal attention no token sees it
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        weights = (logprobs.detach() - old).exp().clamp(max=2.0)
        # the ratio is 1 and its gradient that of the log-probability, because every step is one update
        loss = -(weights * advantages * logprobs * mask).sum() / num_tokens
        loss.backward()

    def reload(self) -> None:
        """Give the engine the new weights."""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in self.model.state_dict().items():
                yield name, value.bfloat16()

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
        self.llm.reset_prefix_cache()


def main() -> None:
    """Train, write `metrics.jsonl`, and save weights."""
    settings = task.Settings.read(sys.argv[1])
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    train = task.prompts(settings.train)
    loop = Loop(settings)
    order = random.Random(settings.seed)
    epoch: list[task.Prompt] = []
    for step in range(settings.num_steps):
        began = time.time()
        if not epoch:
            epoch = order.sample(train, len(train))
        rows, epoch = epoch[: settings.prompts_per_step], epoch[settings.prompts_per_step :]
        groups = loop.sample(rows, settings.group_size)
        sampled = time.time()
        loop.train(groups, step)
        trained = time.time()
        loop.reload()
        task.write_step(settings, step, groups, (began, sampled, trained, time.time()))
        task.save_if_due(settings, step + 1, loop.model)


if __name__ == "__main__":
    main()
