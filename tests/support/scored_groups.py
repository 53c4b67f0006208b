"""Random scored groups whose columns are in this process."""

from collections.abc import Iterable, Sequence

import numpy as np

from rollout.group_parts import split
from rollout.processes import ProcessId
from rollout.types import (
    ColumnsRef,
    FinishReason,
    GroupColumns,
    GroupId,
    GroupSummary,
    Prompt,
    PromptGroup,
    PromptId,
    SamplingSpec,
    Score,
    ScoredGroup,
    ScorerAnswer,
    ScoreStatus,
    WeightSpan,
    WeightVersion,
)


def scored_group(number: int, *, num_samples: int = 4, lengths: Sequence[int] | None = None) -> ScoredGroup:
    """`lengths`: response tokens, drawn if they are not given; long ones make several parts."""
    generator = np.random.default_rng(number)
    drawn = generator.integers(2, 9, num_samples)
    lengths = drawn.tolist() if lengths is None else lengths
    num_samples, longest = len(lengths), max(16, *lengths)
    offsets = np.cumsum([0, *lengths])
    prompt = generator.integers(1, 60, 5).astype(np.int32)
    columns = GroupColumns(
        prompt_ids=prompt,
        response_ids=generator.integers(1, 60, offsets[-1]).astype(np.int32),
        rollout_logprobs=generator.normal(-4.1, 0.3, offsets[-1]).astype(np.float32),
        resampled=generator.random(offsets[-1]) < 0.2,
        offsets=offsets,
    )
    group = PromptGroup(
        group_id=GroupId(number),
        step=0,
        prompt=Prompt(
            prompt_id=PromptId(f"t/{number}"),
            data_source="t",
            token_ids=prompt,
            ground_truth="",
            extra_info_json="null",
        ),
        sampling=SamplingSpec(temperature=0.9, max_response_tokens=longest),
        seeds=tuple(range(num_samples)),
    )
    summary = GroupSummary(
        group_id=group.group_id,
        engine_id=0,
        num_prompt_tokens=5,
        lengths=tuple(int(n) for n in lengths),
        finish_reasons=(FinishReason.STOP,) * num_samples,
        weight_spans=tuple((WeightSpan(weight_version=WeightVersion(0), num_tokens=int(n)),) for n in lengths),
        started_at_s=0.0,
        finished_at_s=1.0,
    )
    rewards = tuple(float(x) for x in generator.normal(size=num_samples))
    return ScoredGroup(
        group=group,
        summary=summary,
        rewards=rewards,
        scores=tuple(Score(reward=r, status=ScoreStatus.OK) for r in rewards),
        columns=tuple(map(ColumnsRef, split(columns))),
    )


def scorer_answer(scores: Iterable[Score], node_id: str = "") -> ScorerAnswer:
    """What a scorer in this process, on a node of Ray's, answers."""
    return ScorerAnswer(scores=tuple(scores), process=ProcessId.of_this_process(node_id))
