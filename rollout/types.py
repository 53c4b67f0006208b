"""The types that pass between packages, from a prompt to a scored group; one frozen type per stage.

Per-token data are read-only numpy arrays: int32 ids, float32 log-probabilities, flags. A response is one sampled
continuation of a prompt, with its end-of-sequence token if that was sampled.

Shape legend: P prompt tokens, G responses of the group, T tokens of one response, S = sum of T over
the group.
"""

import enum
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

from rollout.processes import ProcessId

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

PromptId = NewType("PromptId", str)
"""`DATASET/ROW`: stable over runs; the key of the history."""

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
    """It was aborted from outside and keeps its tokens so far."""

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
    """In addition to the tokenizer's end-of-sequence ids, which always end a response."""


TRAIN = "train"
"""`PromptGroup.purpose` of groups that are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """One prompt and the seeds of its G responses; one engine samples the whole group."""

    group_id: GroupId
    step: int
    """Step for which the group was admitted; for an evaluation, the number of finished steps."""
    prompt: Prompt
    sampling: SamplingSpec
    seeds: tuple[int, ...]
    """[G], one per response; see `rollout.seeds`."""
    purpose: str = TRAIN
    """`TRAIN`, or the name of an evaluation set."""
    occurrence: int = 0
    """Number of earlier groups of the prompt in the same step."""

    @property
    def first_in_visit(self) -> int:
        """Number of the first response in the history's visit, which holds all groups of the prompt and step."""
        return self.occurrence * len(self.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """A run of consecutive response tokens sampled under one weight version."""

    weight_version: WeightVersion
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled response with its log-probabilities, versions and finish reason."""

    response_ids: TokenIds
    """[T]"""
    rollout_logprobs: Logprobs
    """[T], of the quantised sampler, at the sampling temperature."""
    weight_spans: tuple[WeightSpan, ...]
    """In order; their token counts sum to T."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupColumns:
    """Tokens of consecutive responses of one group as one columnar object, held in the object store and not in the
    controller: all of the group, or a part (`rollout.group_parts`).
    """

    prompt_ids: TokenIds
    """[P]"""
    response_ids: TokenIds
    """[S], the responses one after another."""
    rollout_logprobs: Logprobs
    """[S]"""
    resampled: Flags
    """[S], whether the token stands where a draft was rejected."""
    offsets: npt.NDArray[np.int64]
    """[N + 1]; the n-th of these N responses is `response_ids[offsets[n]:offsets[n + 1]]`."""
    first: int = 0
    """Number, in the group, of the first response here."""

    @property
    def num_responses(self) -> int:
        """N, the responses here."""
        return len(self.offsets) - 1

    def response(self, sample: int) -> TokenIds:
        """Token ids of response `sample` of the group, [T]. IndexError if it is not here; so in the next methods."""
        return self.response_ids[self._of(sample)]

    def logprobs(self, sample: int) -> Logprobs:
        """`rollout_logprobs` of response `sample`, [T]."""
        return self.rollout_logprobs[self._of(sample)]

    def resampled_in(self, sample: int) -> Flags:
        """`resampled` of response `sample`, [T]."""
        return self.resampled[self._of(sample)]

    def _of(self, sample: int) -> slice:
        place = sample - self.first
        if not 0 <= place < self.num_responses:
            here = range(self.first, self.first + self.num_responses)
            raise IndexError(f"response {sample} is not in this part of the group, which has {here}")
        return slice(int(self.offsets[place]), int(self.offsets[place + 1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """A finished group without its tokens, as the controller holds it."""

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
    """Wall clock (`time.time()`) when the engine began the group."""
    finished_at_s: float
    fault: str = ""
    """Why the engine can sample no further. Its unfinished responses are aborted and keep their tokens."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a response was aborted and can be continued."""
        return FinishReason.ABORT in self.finish_reasons

    @property
    def oldest_version(self) -> WeightVersion:
        """The oldest weight version that sampled a token of the group."""
        return min(span.weight_version for spans in self.weight_spans for span in spans)


class ScoreStatus(enum.Enum):
    """Outcome of scoring one response."""

    OK = "ok"
    ERROR = "error"
    """The call failed."""
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
    is_left_out: bool = False
    """Whether the response leaves its group: scoring failed, and there is no substitute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvents:
    """What happened to the reward workers of a scorer in some time."""

    num_restarts: int = 0
    """Workers that were killed at a limit or died, and were replaced."""
    num_repeated: int = 0
    """Calls that ran again, because they shared a worker that ended or had not begun there."""
    num_strays: int = 0
    """Processes that calls left behind, and that were killed."""

    def __add__(self, other: "WorkerEvents") -> "WorkerEvents":
        return WorkerEvents(
            num_restarts=self.num_restarts + other.num_restarts,
            num_repeated=self.num_repeated + other.num_repeated,
            num_strays=self.num_strays + other.num_strays,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerAnswer:
    """A scorer's answer for one group."""

    scores: tuple[Score, ...]
    """[G], in the order of the responses."""
    process: ProcessId
    """The scorer's process; another one than before means that the scorer died and was restarted."""
    events: WorkerEvents = WorkerEvents()
    """Since the scorer's last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlot:
    """Placement of one engine."""

    engine_id: int
    num_ranks: int
    """Tensor-parallel size of the engine."""
    cpu_cores: int
    """Cores of the OpenMP pool of each rank (CPU only)."""
    num_gpus: float
    """Fraction of a device for each rank; 0 on CPU."""
    node: str = ""
    """Name of its node; empty on the only node of a run."""
    devices: tuple[int, ...] = ()
    """Number of each rank's device on that node; () on a CPU."""


ColumnsRef = NewType("ColumnsRef", object)
"""Opaque handle of a part of a group's tokens, a `GroupColumns`: an object-store reference in a run, the columns
themselves in one process. The controller passes it on; the trainer rank that trains on the tokens resolves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A finished and scored group as the controller holds it: handles and small numbers, no tokens."""

    group: PromptGroup
    summary: GroupSummary
    rewards: tuple[float, ...]
    """[G], finite; a failed scoring gives a substitute, or 0 where the response is left out."""
    scores: tuple[Score, ...] = ()
    """[G], outcome of each scoring."""
    columns: tuple[ColumnsRef, ...]
    """Parts of the tokens; `rollout.group_parts.part_numbers` of the lengths says which part holds which response."""

    def is_left_out(self, sample: int) -> bool:
        """Whether a response leaves the group because its scoring failed."""
        return bool(self.scores) and self.scores[sample].is_left_out
