"""Data, reward, settings and result files that the peers share. Standard library only: it runs in their environments.

The reward is the value of `rollout.rewards.exact.compute_score` for this task's whole numbers; a test compares them.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Protocol

_MARKED = re.compile(r"answer:\s*(-?\d+)[ .]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every stack is given."""

    model: str
    train: str
    out: str
    """Folder of `metrics.jsonl` and of `weights`, which has a Hugging Face directory for each saved step."""
    seed: int
    num_steps: int
    prompts_per_step: int
    group_size: int
    most_tokens: int
    """Of a response."""
    save_every: int
    """Weights are saved after so many steps."""
    learning_rate: float
    warmup_steps: int
    context: int
    micro_batch_tokens: int
    """Of the plain loop, padding included."""
    samples_at_once: int
    """Of TRL: responses in a micro batch."""
    most_requests: int
    kv_cache_bytes: int
    threads: int

    @classmethod
    def read(cls, path: str) -> "Settings":
        """From a JSON file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """To a JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row of a prompt file."""

    messages: list[dict[str, str]]
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A sampled response."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    """Of the engine, one a token."""
    reward: float


class Tokenizer(Protocol):
    """The used part of a Hugging Face tokenizer."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """The text of a conversation."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a text."""
        ...


def prompts(path: str) -> list[Prompt]:
    """All rows of a prompt file."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [Prompt(messages=row["prompt"], answer=row["answer"]) for row in rows]


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Tokens of a prompt."""
    text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def score(text: str, answer: str) -> float:
    """1 for the right final answer, else 0."""
    found = _MARKED.findall(text)
    return float(bool(found) and int(found[-1]) == int(answer))


def advantages(group: Sequence[Response]) -> list[tuple[Response, float]]:
    """GRPO's advantages; a group of equal rewards has no gradient and is left out."""
    rewards = [sample.reward for sample in group]
    if max(rewards) == min(rewards):
        return []
    mean, deviation = fmean(rewards), stdev(rewards)
    return [(sample, (sample.reward - mean) / (deviation + 1e-6)) for sample in group]


def micro_batches(
    samples: Sequence[tuple[Response, float]], most_tokens: int
) -> Iterator[list[tuple[Response, float]]]:
    """Samples of similar length together, each batch with at most `most_tokens` after padding."""
    batch: list[tuple[Response, float]] = []
    for sample in sorted(samples, key=lambda each: len(each[0].prompt_ids) + len(each[0].ids)):
        length = len(sample[0].prompt_ids) + len(sample[0].ids)
        if batch and length * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


class Model(Protocol):
    """The used part of a Hugging Face model."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write weights and configuration."""
        ...


def save_if_due(settings: Settings, finished_steps: int, model: Model) -> None:
    """Save the weights after every `save_every` steps."""
    if finished_steps % settings.save_every == 0:
        model.save_pretrained(str(Path(settings.out) / "weights" / str(finished_steps)))


def write_step(
    settings: Settings, step: int, groups: Sequence[Sequence[Response]], times: tuple[float, float, float, float]
) -> None:
    """Append a row to `metrics.jsonl`; `times` are wall clocks of begin, sampled, trained, weights reloaded."""
    samples = [sample for group in groups for sample in group]
    row = {
        "step": step,
        "time_s": times[3],
        "reward": fmean(sample.reward for sample in samples),
        "tokens": fmean(len(sample.ids) for sample in samples),
        "step_s": times[3] - times[0],
        "rollout_s": times[1] - times[0],
        "train_s": times[2] - times[1],
        "publish_s": times[3] - times[2],
    }
    _append(Path(settings.out) / "metrics.jsonl", row)


def write_seconds(settings: Settings, step: int, seconds: float) -> None:
    """Append a row to `metrics.jsonl` for a step that ends now and whose parts are not known."""
    _append(Path(settings.out) / "metrics.jsonl", {"step": step, "time_s": time.time(), "step_s": seconds})


def _append(path: Path, row: dict[str, float]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
