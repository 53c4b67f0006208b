"""The types that cross walls on the way from a prompt to a scored group; one frozen type per stage.

Per-token data are read-only numpy arrays: int32 ids, float32 log-probabilities. A response is one
sampled continuation of a prompt, end-of-sequence token included when it was sampled.

Shape legend: P prompt tokens, G responses of the group, T tokens of one response, S = sum of T over
the group.
"""

import enum
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]

PromptId = NewType("PromptId", str)
"""`DATASET/ROW`: stable over runs, the key of the history."""

GroupId = NewType("GroupId", int)
"""Number of the group in the order in which the run admitted it; never reused."""

WeightVersion = NewType("WeightVersion", int)
"""The policy version whose quantised copy an engine holds; -1 before publish 0."""


class FinishReason(enum.Enum):
    """Why a response ended."""

    STOP = "stop"
    """A stop token or stop string was produced."""
    LENGTH = "length"
    """The token limit cut it."""
    ABORT = "abort"
    """It was aborted from outside; its tokens so far are kept."""

    @property
    def is_truncated(self) -> bool:
        """True unless the model itself ended the response."""
        return self is not FinishReason.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set, rendered through the chat template and tokenised."""

    prompt_id: PromptId
    data_source: str
    """Name under which rewards and evaluation results are grouped."""
    token_ids: TokenIds
    """[P], generation prompt included."""
    ground_truth: str
    extra_info_json: str
    """The row's `extra_info` as JSON text (`null` where the row has none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How responses are sampled. Training keeps `top_p == 1` and `top_k == 0` (decision 2)."""

    temperature: float
    """0 is greedy."""
    max_response_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the tokenizer's end-of-sequence ids, which the engine always knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """One prompt and the orders for its G responses, placed whole on one engine."""

    group_id: GroupId
    step: int
    """Step for which it was admitted; for an evaluation, the number of finished steps."""
    prompt: Prompt
    sampling: SamplingSpec
    seeds: tuple[int, ...]
    """[G], one per response; see `rollout.seeds`."""
    purpose: str = "train"
    """`train`, or the name of an evaluation set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """A run of consecutive response tokens sampled under one weight version."""

    weight_version: WeightVersion
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled response with what is known of it."""

    response_ids: TokenIds
    """[T]"""
    rollout_logprobs: Logprobs
    """[T], of the quantised sampler, processed: at the sampling temperature."""
    weight_spans: tuple[WeightSpan, ...]
    """In order; their token counts sum to T."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupColumns:
    """All tokens of one group as one columnar object; lives in the object store, not in the controller."""

    prompt_ids: TokenIds
    """[P]"""
    response_ids: TokenIds
    """[S], the G responses one after another."""
    rollout_logprobs: Logprobs
    """[S]"""
    offsets: npt.NDArray[np.int64]
    """[G + 1]; response g is `response_ids[offsets[g]:offsets[g + 1]]`."""

    def response(self, sample: int) -> TokenIds:
        """Token ids of response `sample`, [T]."""
        return self.response_ids[self.offsets[sample] : self.offsets[sample + 1]]

    def logprobs(self, sample: int) -> Logprobs:
        """`rollout_logprobs` of response `sample`, [T]."""
        return self.rollout_logprobs[self.offsets[sample] : self.offsets[sample + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What the controller knows of a finished group without its tokens."""

    group_id: GroupId
    engine_id: int
    num_prompt_tokens: int
    lengths: tuple[int, ...]
    """[G] response tokens."""
    finish_reasons: tuple[FinishReason, ...]
    """[G]"""
    weight_spans: tuple[tuple[WeightSpan, ...], ...]
    """[G]"""
    started_at_s: float
    """Wall clock (`time.time()`) when the engine took the group."""
    finished_at_s: float
    fault: str = ""
    """Why the engine can sample no further; its unfinished responses are aborted, with the tokens that they had."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a response was aborted and could go on."""
        return FinishReason.ABORT in self.finish_reasons

    @property
    def oldest_version(self) -> WeightVersion:
        """The oldest weight version that any token of the group was sampled under."""
        return min(span.weight_version for spans in self.weight_spans for span in spans)


class ScoreStatus(enum.Enum):
    """How a reward came about."""

    OK = "ok"
    ERROR = "error"
    """The reward function raised; the configured substitute was used."""
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Reward of one response."""

    reward: float
    status: ScoreStatus
    details: tuple[tuple[str, float], ...] = ()
    """Further numbers that the reward function returned beside `score`, by name."""
    error: str = ""
    """One line for `ERROR` and `TIMEOUT`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlot:
    """Where one engine lives."""

    engine_id: int
    num_ranks: int
    """Tensor-parallel size of the engine."""
    cpu_cores: int
    """Cores its OpenMP pool may use per rank (CPU only)."""
    num_gpus: float
    """Fraction of a device for each rank; 0 on CPU."""
    devices: tuple[int, ...] = ()
    """Device of each rank; () on CPU, and where Ray chooses."""


ColumnsRef = NewType("ColumnsRef", object)
"""Opaque handle of a `GroupColumns`: an object-store reference in a run, the columns themselves in one process.
The controller only carries it; whoever trains on the tokens resolves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A finished and scored group as the controller holds it: handles and small numbers, no tokens."""

    group: PromptGroup
    summary: GroupSummary
    rewards: tuple[float, ...]
    """[G], finite; a failed scoring has the configured substitute."""
    scores: tuple[Score, ...] = ()
    """[G], how each reward came about."""
    columns: ColumnsRef
