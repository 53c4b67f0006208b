"""Configuration of data, engines, sampling, rewards and evaluation."""

import json
import math
from typing import Literal

from pydantic import Field, PositiveFloat, field_validator
from pydantic_core import PydanticCustomError

from history.config import LONGEST_S, MOST_BYTES, MOST_PROCESSES, Config

Format = Literal["bf16", "int8", "fp8_channel", "fp8_block"]
"""Weight formats of an engine."""

KvFormat = Literal["bf16", "fp8"]
"""Formats of an engine's keys and values."""

InFlight = Literal["recompute", "keep_kv", "drain"]
"""How running responses continue after an engine gets new weights."""


BATCHED_TOKENS = 2048
"""Most tokens of one forward of an engine without drafts (vLLM's default)."""

DRAFTED_TOKENS = 4096
"""Most tokens of one forward with drafts, if there are fewer requests. A larger forward is bound by its products on
every GPU, so drafts do not pay there, and the logits of its rows take gigabytes."""

GRAPH_TOKENS = 512
"""Most tokens of a forward with a CUDA graph in an engine without drafts (vLLM's default)."""

DRAFTED_GRAPH_TOKENS = 2048
"""Most tokens of a forward with a CUDA graph and drafts. The work of a larger forward hides its launches."""

GPU_LOGITS_AT_ONCE = 1 << 25
"""Logits that the sampler processes at a time on a GPU: 128 MB in FP32."""


class DatasetConfig(Config):
    """One file of prompts."""

    path: str
    """A `.jsonl` or `.parquet` file."""
    name: str = ""
    """Name in prompt ids and metrics. Empty: the file name without its suffix."""
    weight: float = Field(default=1.0, gt=0)
    """Relative share of this file in the training mixture."""


class DataConfig(Config):
    """Training prompts and their order."""

    train: tuple[DatasetConfig, ...]
    """Files of training prompts."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Most tokens of a prompt, counted after the chat template."""
    overlong_prompts: Literal["refuse", "drop", "truncate"] = "refuse"
    """`refuse` ends the run at load and names the row. `drop` and `truncate` (from the left) are counted."""
    chat_template_arguments: dict[str, str | int | float | bool] = {}
    """Arguments of the chat template by name, as `enable_thinking`, for training and evaluation prompts. A name that
    the template does not read is refused."""
    shuffle: bool = True
    """Shuffle the prompts anew in every epoch, by the run's seed and the epoch number."""


class SamplingConfig(Config):
    """Sampling of training responses. Top-p and top-k are refused because they bias importance weights."""

    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature. The trainer divides its logits by the same number. vLLM would sample at 0.01 if it were
    lower."""
    max_response_tokens: int = Field(default=1024, gt=0)
    """Most tokens of a response. A response that reaches the limit counts as truncated."""
    top_p: float = 1.0
    """Must be 1 for training."""
    top_k: int = 0
    """Must be 0 (no limit) for training."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to the model's end-of-sequence tokens."""


class EngineConfig(Config):
    """The vLLM engines."""

    num_engines: int = Field(default=1, gt=0, le=MOST_PROCESSES)
    """Number of engines."""
    tensor_parallel: int = Field(default=1, gt=0)
    """Tensor-parallel size of one engine."""
    format: Format = "bf16"
    """Weight format of linear layers and of their products. Embeddings, `lm_head` and norms are always BF16. FP8 needs
    GPUs of capability 8.9 or above, INT8 GPUs below 10.0."""
    bf16_first_layers: int = Field(default=1, ge=0)
    """Number of first decoder layers that stay BF16 in an 8-bit format. First and last layers lose most accuracy."""
    bf16_last_layers: int = Field(default=1, ge=0)
    """Number of last decoder layers that stay BF16 in an 8-bit format."""
    bf16_modules: tuple[str, ...] = ()
    """Further modules that stay BF16, by Hugging Face name. `*` matches anything: `*.mlp.down_proj`."""
    kv_format: KvFormat = "bf16"
    """Format of keys and values. With `fp8` (e4m3) twice as many tokens fit into the KV cache. After each publish every
    layer sets its scales anew, by what the probe prompt writes. CPUs need AVX-512 for it, GPUs capability 8.9."""
    max_num_seqs: int = Field(default=64, gt=0)
    """Most requests that one engine decodes at the same time."""
    kv_cache_bytes: int = Field(default=256 << 20, gt=0)
    """Size of the KV cache on each rank."""
    gpu_memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU that is filled while engines hold keys and values. The KV cache takes what the memory plan leaves
    of it, in the place of `engine.kv_cache_bytes`. GPUs only."""
    cpu_cores: int = Field(default=1, gt=0)
    """OpenMP threads of each rank. CPU engines only."""
    sleep_level: int = Field(default=0, ge=0, le=2)
    """Device memory that engines release while the trainer works. GPUs only. 0: none. 1: the KV cache is discarded and
    weights move to host memory. 2: KV cache and weights are discarded; the next publish brings new weights."""
    # Rounding grows with the logits and with the root of the depth. BF16 alone made 0.0125 to 0.017 of the spread in
    # models of 4 layers, so 64 layers may make 0.07. An engine with another rotary base made 0.47.
    probe_max_logprob_gap: dict[Format, PositiveFloat] = {
        "bf16": 0.1,
        "int8": 0.6,
        "fp8_channel": 0.6,
        "fp8_block": 0.6,
    }
    """Largest mean absolute difference between an engine's and the trainer's log-probabilities of the probe prompt, per
    nat of their spread: the standard deviation of the trainer's, at least 1. It includes 8-bit rounding, because the
    trainer uses its own weights. Above it the publish fails. Formats that are not named keep their bounds."""
    # e4m3 rounds what attention reads; `fp8_channel` rounds inputs and weights of every linear layer the same way. The
    # former alone made 0.5 to 0.85 of the difference that rounded inputs alone make in random models of 2 to 64 layers,
    # so it gets 3/4 of the bound of `fp8_channel`.
    probe_max_kv_gap: float = Field(default=0.45, gt=0)
    """What `kv_format` = fp8 may add to this difference: the bound is the root of the sum of both squares."""
    max_restarts: int = Field(default=3, ge=0)
    """Most restarts of dead engines, all together, within the last 100 finished steps; one more death ends the run.
    Interrupted groups resume on any engine."""
    progress_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """An engine that emits no token for this long, although it has responses to sample, is ended and counts as dead."""
    start_timeout_s: float = Field(default=1200.0, gt=0, le=LONGEST_S)
    """Deadline of engines that start together. The first start on a node compiles kernels and captures CUDA graphs."""
    update_timeout_s: float = Field(default=300.0, gt=0, le=LONGEST_S)
    """Deadline of a weight update on an engine. An engine that misses it is fenced, and the error names it."""
    vllm: dict[str, str | int | float | bool] = {}
    """Further engine arguments of vLLM, passed unchanged. vLLM checks their names before a run starts, and their values
    when engines start. Some values of `max_num_batched_tokens` and `enable_chunked_prefill` are refused earlier."""

    @property
    def formats(self) -> str:
        """Label of figures that the engines measure: their weight format, and that of keys and values unless BF16."""
        return self.format if self.kv_format == "bf16" else f"{self.format}_kv_{self.kv_format}"

    @field_validator("probe_max_logprob_gap")
    @classmethod
    def _keeps_other_bounds(cls, given: dict[Format, float]) -> dict[Format, float]:
        defaults: dict[Format, float] = cls.model_fields["probe_max_logprob_gap"].default
        return defaults | given

    @field_validator("vllm")
    @classmethod
    def _counts_tokens(cls, given: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        """Memory plan and graphs count the tokens of a forward, long before vLLM reads the value."""
        most = given.get("max_num_batched_tokens", BATCHED_TOKENS)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise PydanticCustomError(
                "vllm_argument",
                "`max_num_batched_tokens` = {value} is not a whole number above 0; write it in digits, as 8192",
                {"value": json.dumps(most)},
            )
        return given

    @property
    def max_probe_gap(self) -> float:
        """Bound of a probe's difference. Roundings of weights are independent of those of keys and values."""
        of_weights = self.probe_max_logprob_gap[self.format]
        return math.hypot(of_weights, self.probe_max_kv_gap) if self.kv_format == "fp8" else of_weights

    def forward_tokens(self, draft_tokens: int) -> int:
        """Most tokens of a forward: `vllm.max_num_batched_tokens`, else enough for a full draft of every request.

        At most `DRAFTED_TOKENS`; in a larger batch drafts are shortened evenly.
        """
        default = max(BATCHED_TOKENS, min(self.max_num_seqs * (1 + draft_tokens), DRAFTED_TOKENS), self.max_num_seqs)
        return int(self.vllm.get("max_num_batched_tokens", default))

    def graph_tokens(self, draft_tokens: int) -> int:
        """Most tokens of a forward with a CUDA graph; 0 without graphs.

        With drafts it is a multiple of a request's tokens with a full draft: vLLM captures no other sizes.
        """
        if self.vllm.get("enforce_eager"):
            return 0
        most = self.forward_tokens(draft_tokens)
        if not draft_tokens:
            return min(most, 2 * self.max_num_seqs, GRAPH_TOKENS)
        most = min(most, DRAFTED_GRAPH_TOKENS)
        return most - most % (1 + draft_tokens)


class PlannerConfig(Config):
    """Assignment of groups to engines, and how far engines run ahead of the trainer."""

    policy: Literal["static", "lpt", "histopipe", "adaptive", "flexible"] = "adaptive"
    """`static`: equal numbers of groups in data order. `lpt`: longest expected group first, to the least loaded engine.
    `histopipe`: RhymeRL's ranges of expected length, each of equal cost, in alternating order. `adaptive`: like `lpt`,
    and an idle engine takes groups that wait for another engine. `flexible`: like `adaptive`, and a step trains on the
    groups that finish first."""
    overlap: int = Field(default=0, ge=0)
    """How many steps are sampled ahead of training. 0 trains after all responses of a step; 1 samples the next step
    during training. Responses become this many policy versions stale."""
    head_start: float = Field(default=0.0, ge=0, lt=1)
    """Share of a step's groups that is admitted one more step ahead: those with the longest expected responses. It
    applies only while length forecasts are good enough. Not for `flexible`."""
    tail_engines: int = Field(default=0, ge=0)
    """Number of engines that sample only the groups with the longest expected responses. In simulation this costs time
    even with exact lengths (`benchmarks.planner`)."""
    migration: bool = True
    """An idle engine takes over a running group from a full engine if the group then finishes sooner. The group keeps
    its tokens; its keys and values are recomputed."""
    max_staleness: int = Field(default=0, ge=0)
    """Most policy versions published between a response's first token and its training. It must be at least `overlap`,
    plus one with `head_start`."""


class RewardConfig(Config):
    """Scoring of responses."""

    function: str = "rollout.rewards.exact.compute_score"
    """Dotted path of `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`. It may be an
    `async def`."""
    num_scorers: int = Field(default=1, gt=0, le=MOST_PROCESSES)
    """Number of scorers. They take the nodes of the run in turn, and each has `num_workers` workers."""
    num_workers: int = Field(default=1, gt=0)
    """Number of responses that a scorer scores at a time, over all its groups; each has a worker process."""
    async_concurrency: int = Field(default=16, gt=0)
    """Number of calls that a worker awaits at a time if the function is an `async def`."""
    timeout_s: float = Field(default=10.0, gt=0, le=LONGEST_S)
    """Time limit for scoring one response."""
    cpu_s: float = Field(default=120.0, gt=0, le=LONGEST_S)
    """Most CPU seconds of a call, with all processes that it starts. A call that needs more counts as late."""
    max_processes: int = Field(default=64, gt=0)
    """Most processes that a call has at a time, beside its worker. A call that has more fails."""
    memory_bytes: int = Field(default=8 << 30, gt=0, le=MOST_BYTES)
    """Most memory of a reward worker, and of each process that it starts. A call that needs more fails."""
    max_file_bytes: int = Field(default=1 << 30, gt=0, le=MOST_BYTES)
    """Largest file that a reward worker may write. A call that writes more fails."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the function needs, such as the key of a service. Each must be set where the
    command starts, and a SLURM job receives them. Workers have no others but paths, language, threads and proxies."""
    max_restarts: int = Field(default=3, ge=0)
    """Most restarts of each scorer, and of the process that writes samples, after it died or hung. They count from the
    start of the command. Its calls are repeated."""
    failure_score: float | None = None
    """Reward of a response whose scoring failed or exceeded the time limit. Without it the response leaves its group:
    it is not trained on, and has no part in the baseline. But a late one has the `LATE_SCORE` of the function's module,
    if there is one. All are counted. In an evaluation it scores 0."""


class EvalSetConfig(Config):
    """One evaluation set."""

    path: str
    """A `.jsonl` or `.parquet` file."""
    samples_per_prompt: int = Field(default=1, gt=0)
    """Responses per prompt: the k of avg@k and pass@k."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature. 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Top-p of evaluation responses. Truncated sampling is allowed here."""
    max_response_tokens: int = Field(default=1024, gt=0)
    """Most tokens of a response."""
    limit: int = Field(default=0, ge=0)
    """Use only this many rows from the start of the file. 0 means all."""


class EvaluationConfig(Config):
    """Evaluation during the run, on the engines in their format. The format is part of the metric's label."""

    sets: dict[str, EvalSetConfig] = {}
    """Evaluation sets by name."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations. 0 means only before the first and after the last step."""
    bf16_before_after: bool = True
    """Evaluate the first and the last weights in a BF16 engine as well, for the final table."""
