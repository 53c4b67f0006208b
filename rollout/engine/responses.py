"""The responses in flight inside one engine, with the weight version of each token.

A response may have begun on another engine. Its earlier part (`Finished`, aborted) is then part of the prompt here, and
precedes the new tokens when the response is finished.

Invariants: the spans of a response are in order and sum to its length (one span of length 0 if it was aborted before
its first token). A response that has ended keeps its last version, even if it is collected after an update.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from history.types import prompt_key
from rollout.seeds import continued_seed
from rollout.types import (
    FinishReason,
    Flags,
    GroupColumns,
    GroupId,
    GroupSummary,
    Logprobs,
    PromptGroup,
    PromptId,
    SamplingSpec,
    TokenIds,
    WeightSpan,
    WeightVersion,
)
from rollout.worker.proposer import COUNTED, PROMPT_KEY, STEP
from rollout.worker.vllm_compat import RESAMPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One ended response; with the reason `ABORT` it can be continued."""

    response_ids: TokenIds
    """[T]"""
    rollout_logprobs: Logprobs
    """[T]"""
    resampled: Flags
    """[T], whether the token stands where a draft was rejected."""
    reason: FinishReason
    weight_spans: tuple[WeightSpan, ...]

    def followed_by(self, rest: "Finished") -> "Finished":
        """This response with its continuation `rest`."""
        return Finished(
            response_ids=np.concatenate([self.response_ids, rest.response_ids]),
            rollout_logprobs=np.concatenate([self.rollout_logprobs, rest.rollout_logprobs]),
            resampled=np.concatenate([self.resampled, rest.resampled]),
            reason=rest.reason,
            weight_spans=_joined_spans([*self.weight_spans, *rest.weight_spans]),
        )


EMPTY = Finished(
    response_ids=np.zeros(0, dtype=np.int32),
    rollout_logprobs=np.zeros(0, dtype=np.float32),
    resampled=np.zeros(0, dtype=np.bool_),
    reason=FinishReason.ABORT,
    weight_spans=(),
)
"""A response without tokens."""


def earlier_parts(summary: GroupSummary | None, columns: GroupColumns | None, size: int) -> list[Finished]:
    """The `size` responses of a group as another engine returned them; `EMPTY` if no engine has begun the group."""
    if summary is None or columns is None:
        return [EMPTY] * size
    return [
        Finished(
            response_ids=columns.response(sample),
            rollout_logprobs=columns.logprobs(sample),
            resampled=columns.resampled_in(sample),
            reason=summary.finish_reasons[sample],
            weight_spans=summary.weight_spans[sample],
        )
        for sample in range(size)
    ]


@dataclass(slots=True, kw_only=True, eq=False)
class Response:
    """One response in flight."""

    group: PromptGroup
    sample: int
    """Number in the group."""
    queue: RequestOutputCollector
    """Receives the output of its request; another request may replace it."""
    salt: str = ""
    """Of the request; see `token_prompt`."""
    before: Finished = EMPTY
    """The part that another engine sampled."""
    stamps: list[tuple[WeightVersion, int]] = field(default_factory=list)
    """(version, emitted tokens at the version's end) of every weight version that ended since the response began."""
    ended_under: WeightVersion | None = None
    """The last version, set if the response ended before that version did."""

    @property
    def request_id(self) -> str:
        """Id of the request inside vLLM."""
        return str(self.queue.request_id)


def sampling_params(
    sampling: SamplingSpec,
    seed: int,
    stop_ids: tuple[int, ...],
    extra_args: Mapping[str, object],
    *,
    emitted: int = 0,
) -> SamplingParams:
    """Sampling parameters of one response for vLLM.

    `stop_ids` are the model's end-of-sequence ids, and `extra_args` those of `draft_args`. The response already
    has `emitted` tokens.
    """
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens - emitted,
        seed=continued_seed(seed, emitted),
        stop_token_ids=sorted({*stop_ids, *sampling.stop_token_ids}),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=dict(extra_args),
    )


def draft_args(prompt_id: PromptId, step: int, *, is_counted: bool = True) -> dict[str, object]:
    """What the proposer must know of a request; draft statistics count the request if it `is_counted`."""
    return {PROMPT_KEY: prompt_key(prompt_id), STEP: step, COUNTED: is_counted}


def token_prompt(token_ids: TokenIds, *, salt: str) -> TokensPrompt:
    """A prompt for vLLM; only prompts with equal salts share cached prefixes."""
    prompt = TokensPrompt(prompt_token_ids=[int(token) for token in token_ids])
    if salt:
        prompt["cache_salt"] = salt
    return prompt


def check_length(group: PromptGroup, max_model_len: int) -> None:
    """Refuse a group that exceeds the engine's longest request.

    Raises:
        ValueError: prompt and response together exceed `max_model_len`.
    """
    prompt, limit = len(group.prompt.token_ids), group.sampling.max_response_tokens
    if prompt + limit > max_model_len:
        raise ValueError(
            f"group {group.group_id}: prompt of {prompt} tokens and {limit} response tokens exceed max_model_len "
            f"{max_model_len}; shorten one or raise it"
        )


class ResponseLedger:
    """All responses in flight."""

    def __init__(self) -> None:
        self._running: dict[Response, None] = {}
        """In the order of their first requests."""
        self.num_finished = 0
        self.num_tokens = 0
        """Tokens of finished responses."""

    def __len__(self) -> int:
        return len(self._running)

    def add(self, response: Response) -> None:
        """Add a response that vLLM has accepted."""
        self._running[response] = None

    def of_group(self, group_id: GroupId) -> list[str]:
        """Request ids of a group's responses that are still in flight."""
        return sorted(r.request_id for r in self._running if r.group.group_id == group_id)

    def by_group(self) -> dict[GroupId, list[Response]]:
        """All responses in flight, by group."""
        groups: dict[GroupId, list[Response]] = {}
        for response in self._running:
            groups.setdefault(response.group.group_id, []).append(response)
        return groups

    def request_ids(self) -> list[str]:
        """Request ids of all responses in flight."""
        return [response.request_id for response in self._running]

    def salted_otherwise(self, salt: str) -> list[Response]:
        """Responses in flight whose requests have another salt, in the order of their first requests."""
        return [response for response in self._running if response.salt != salt]

    def stamp(self, ending: WeightVersion, emitted: Callable[[str], int | None]) -> None:
        """Record for every response its number of tokens at the end of a weight version.

        Args:
            ending: the weight version; it samples no further token.
            emitted: number of tokens of a request so far, None if it has ended.
        """
        for response in self._running:
            count = emitted(response.request_id)
            if count is not None:
                response.stamps.append((ending, count))
            elif response.ended_under is None:
                response.ended_under = ending

    def finish(self, response: Response, output: RequestOutput, current: WeightVersion) -> Finished:
        """Close a response with its final output; `current` is the engine's current version."""
        self._running.pop(response, None)
        completion = output.outputs[0]
        response_ids = np.array(completion.token_ids, dtype=np.int32)
        logprobs = np.array(completion.logprobs.logprobs if len(response_ids) else [], dtype=np.float32)
        ranks = np.array(completion.logprobs.ranks if len(response_ids) else [], dtype=np.int64)
        if len(logprobs) != len(response_ids):
            raise RuntimeError(f"vLLM returned {len(logprobs)} log-probabilities for {len(response_ids)} tokens")
        last = current if response.ended_under is None else response.ended_under
        self.num_finished += 1
        self.num_tokens += len(response_ids)
        rest = Finished(
            response_ids=response_ids,
            rollout_logprobs=logprobs,
            resampled=ranks == RESAMPLED,
            reason=FinishReason(completion.finish_reason),
            weight_spans=spans(response.stamps, last, len(response_ids)),
        )
        return response.before.followed_by(rest)

    def cut_off(
        self, response: Response, emitted: tuple[TokenIds, Logprobs, Flags], current: WeightVersion
    ) -> Finished:
        """Close a response of a dead engine with the tokens and log-probabilities received so far."""
        self._running.pop(response, None)
        last = current if response.ended_under is None else response.ended_under
        ids, logprobs, resampled = emitted
        rest = Finished(
            response_ids=ids,
            rollout_logprobs=logprobs,
            resampled=resampled,
            reason=FinishReason.ABORT,
            weight_spans=spans(response.stamps, last, len(ids)),
        )
        return response.before.followed_by(rest)

    def drop(self, responses: Iterable[Response]) -> None:
        """Remove responses of a failed engine."""
        for response in responses:
            self._running.pop(response, None)


def spans(stamps: list[tuple[WeightVersion, int]], last: WeightVersion, length: int) -> tuple[WeightSpan, ...]:
    """Version spans of a response of `length` tokens, from the stamps of the versions before `last`."""
    by_version: list[WeightSpan] = []
    start = 0
    for version, end in [*stamps, (last, length)]:
        if end > start:
            by_version.append(WeightSpan(weight_version=version, num_tokens=end - start))
            start = end
    return tuple(by_version) or (WeightSpan(weight_version=last, num_tokens=0),)


def _joined_spans(parts: Sequence[WeightSpan]) -> tuple[WeightSpan, ...]:
    """Join adjacent spans of one version and drop empty spans; without any tokens, keep the last span."""
    joined: list[WeightSpan] = []
    for part in parts:
        if joined and joined[-1].weight_version == part.weight_version:
            joined[-1] = replace(part, num_tokens=joined[-1].num_tokens + part.num_tokens)
        elif part.num_tokens:
            joined.append(part)
    return tuple(joined) or tuple(parts[-1:])


def _check_finite(group: PromptGroup, sample: int, finished: Finished) -> None:
    wrong = np.flatnonzero(~np.isfinite(finished.rollout_logprobs))
    if len(wrong) == 0:
        return
    ends = np.cumsum([span.num_tokens for span in finished.weight_spans])
    version = finished.weight_spans[int(np.searchsorted(ends, wrong[0], side="right"))].weight_version
    raise RuntimeError(
        f"group {group.group_id}: {len(wrong)} of {len(finished.response_ids)} log-probabilities of response {sample} "
        f"are not finite, the first of token {wrong[0]}, sampled from weight version {version}: the engine's numbers "
        "overflow or its weights are broken; a run with engine.format=bf16 shows whether the 8-bit format is the cause"
    )


def columns(group: PromptGroup, finished: list[Finished]) -> GroupColumns:
    """Join the responses of a group into one columnar object, its arrays read-only.

    Raises:
        RuntimeError: a log-probability is not finite, and would make the trainer's gradient not finite.
    """
    for sample, response in enumerate(finished):
        _check_finite(group, sample, response)
    offsets = np.zeros(len(finished) + 1, dtype=np.int64)
    np.cumsum([len(f.response_ids) for f in finished], out=offsets[1:])
    joined = GroupColumns(
        prompt_ids=np.array(group.prompt.token_ids, dtype=np.int32),
        response_ids=np.concatenate([f.response_ids for f in finished]),
        rollout_logprobs=np.concatenate([f.rollout_logprobs for f in finished]),
        resampled=np.concatenate([f.resampled for f in finished]),
        offsets=offsets,
    )
    for array in (joined.prompt_ids, joined.response_ids, joined.rollout_logprobs, joined.resampled, joined.offsets):
        array.flags.writeable = False
    return joined
