"""Configuration of data, engines, sampling, rewards and evaluation."""

from typing import Literal

from pydantic import Field

from history.config import Config

Format = Literal["bf16", "int8", "fp8_channel", "fp8_block"]
"""Weight formats an engine can hold today."""

InFlight = Literal["recompute", "keep_kv", "drain"]
"""What becomes of responses that are in flight when an engine gets new weights."""


class DatasetConfig(Config):
    """One file of prompts."""

    path: str
    """A `.jsonl` or `.parquet` file."""
    name: str = ""
    """Used in prompt ids and metrics; the file's stem when empty."""
    weight: float = Field(default=1.0, gt=0)
    """Relative share of this file in the training mixture."""


class DataConfig(Config):
    """What is trained on, and in which order."""

    train: tuple[DatasetConfig, ...]
    """The training mixture."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Prompts are measured after the chat template."""
    overlong_prompts: Literal["refuse", "drop", "truncate"] = "refuse"
    """`refuse` stops at load, naming the row; `drop` and `truncate` (from the left) are counted."""
    shuffle: bool = True
    """A fresh permutation per epoch, a function of the run's seed and the epoch."""


class SamplingConfig(Config):
    """How training responses are sampled. Truncated sampling would bias the TIS weights, so it is refused."""

    temperature: float = Field(default=1.0, gt=0)
    """The trainer divides its logits by the same number."""
    max_response_tokens: int = Field(default=1024, gt=0)
    """Longer responses are cut and count as truncated."""
    top_p: float = 1.0
    """Anything but 1 is refused for training."""
    top_k: int = 0
    """Anything but 0 is refused for training."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-sequence tokens."""


class EngineConfig(Config):
    """The vLLM engines."""

    num_engines: int = Field(default=1, gt=0)
    """Engines of the pool."""
    tensor_parallel: int = Field(default=1, gt=0)
    """Ranks of one engine."""
    format: Format = "bf16"
    """What the weights of linear layers are held and multiplied in; embeddings, `lm_head` and norms are always BF16."""
    bf16_first_layers: int = Field(default=1, ge=0)
    """So many decoder layers from the first on stay BF16 in an 8-bit format: they and the last ones lose most by it."""
    bf16_last_layers: int = Field(default=1, ge=0)
    """So many decoder layers up to the last stay BF16 in an 8-bit format."""
    bf16_modules: tuple[str, ...] = ()
    """Further modules that stay BF16 in an 8-bit format, by Hugging Face name; `*` is anything: `*.mlp.down_proj`."""
    max_num_seqs: int = Field(default=64, gt=0)
    """Requests that one engine decodes at once."""
    kv_cache_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes of keys and values per rank."""
    cpu_cores: int = Field(default=1, gt=0)
    """OpenMP threads per rank; CPU engines only."""
    sleep_level: Literal[0, 1, 2] = 0
    """What engines give up while the trainer works; GPUs only. 0: nothing. 1: keys and values, and weights go to host
    memory. 2: both are discarded, since new weights come before an engine serves again."""
    probe_max_logprob_gap: dict[Format, float] = {"bf16": 0.05, "int8": 0.6, "fp8_channel": 0.6, "fp8_block": 0.6}
    """Publishing fails if the mean absolute difference between the engine's log-probabilities of the probe prompt and
    the trainer's own (from the dequantised codes) exceeds this."""
    max_restarts: int = Field(default=3, ge=0)
    """So many times in a run an engine that has died is started again; its responses go on, or begin again."""
    update_timeout_s: float = Field(default=300.0, gt=0)
    """An engine that has not finished an update by then is late: it is fenced and named."""
    vllm: dict[str, str | int | float | bool] = {}
    """Further engine arguments, handed to vLLM as they are and checked by its own classes."""


class PlannerConfig(Config):
    """Which engine samples what, and how far engines run ahead of the trainer."""

    policy: Literal["static", "lpt", "histopipe", "adaptive", "flexible"] = "adaptive"
    """`static`: equal counts in the order of the data. `lpt`: longest expected first, onto balanced engines.
    `histopipe`: RhymeRL's runs of equal expected length, in alternating order. `adaptive`: as `lpt`, and an engine that
    has nothing left of a step takes what waits for another. `flexible`: as `adaptive`, and a step trains on the
    groups that are complete first."""
    overlap: int = Field(default=0, ge=0)
    """Steps that are admitted before their turn: 0 waits for every response before training, 1 samples the next step
    meanwhile. Responses become so many policy versions stale."""
    head_start: float = Field(default=0.0, ge=0, lt=1)
    """Share of a step's groups, those with the longest expected responses, that is admitted one step earlier still;
    only while lengths are foretold well enough. Not for `flexible`."""
    tail_engines: int = Field(default=0, ge=0)
    """So many engines are kept for the groups with the longest expected responses. Simulated, it costs
    time even where lengths are known (`benchmarks.planner`)."""
    migration: bool = True
    """An engine that has nothing to do takes over a running group, tokens and all, from one that is full, where that
    ends the group sooner although its keys and values are computed again."""
    max_staleness: int = Field(default=0, ge=0)
    """Most policy versions that may be published between a response's first token and its training; has to allow
    for `overlap`, and for one more with `head_start`."""


class RewardConfig(Config):
    """How responses are scored."""

    function: str = "rollout.rewards.exact.compute_score"
    """Dotted path of `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`."""
    num_workers: int = Field(default=1, gt=0)
    """Processes that score at the same time."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit for one response."""
    failure_score: float = 0.0
    """Reward of a response whose scoring raised or ran out of time (both are counted)."""


class EvalSetConfig(Config):
    """One named evaluation set."""

    path: str
    """A `.jsonl` or `.parquet` file."""
    samples_per_prompt: int = Field(default=1, gt=0)
    """k of avg@k and pass@k."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Evaluation may truncate as it likes."""
    max_response_tokens: int = Field(default=1024, gt=0)
    """Longer responses are cut."""
    limit: int = Field(default=0, ge=0)
    """Only the first so many rows; 0 means all."""


class EvaluationConfig(Config):
    """Evaluation inside the run, on the engines as they are (their format is part of the metric's label)."""

    sets: dict[str, EvalSetConfig] = {}
    """By name."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 means only before step 0 and after the last."""
    bf16_before_after: bool = True
    """Evaluate the first and the last weights once more in a BF16 engine, for the final table."""
