"""Selects the samples of a step from scored groups: filter, reward shaping, advantage.

Pure: it reads lengths, rewards and versions, never tokens.

* Aborted and empty responses are dropped first, because their reward has no meaning.
* Responses whose scoring failed are left out of their group, unless `reward.failure_score` gives them a reward.
* A filter of rewards drops groups before the advantage, a filter of signals after it (`megatron_rl.algorithm`).
* With `mask_truncated`, truncated responses count in their group's baseline but are not trained on.

Invariant: samples + dropped responses = all responses, in every group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.algorithm.advantages import BatchOutcome, GroupOutcome, Rewards, checked
from megatron_rl.algorithm.filters import GroupSignal
from megatron_rl.algorithm.plug_in import Loaded, load_stage
from megatron_rl.algorithm_settings import ADVANTAGES, FILTERS, SHAPINGS, AdvantageChoice
from megatron_rl.config import AlgorithmConfig
from rollout.evaluation import accuracy
from rollout.group_parts import part_numbers
from rollout.types import ColumnsRef, FinishReason, GroupId, ScoredGroup, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One response to train on, by handle."""

    group_id: GroupId
    sample: int
    """Index of the response in its group: `columns.response(sample)`."""
    part: int
    """Number of the part of the group's tokens that holds the response."""
    columns: ColumnsRef
    """Handle of that part."""
    num_prompt_tokens: int
    num_response_tokens: int
    reward: float
    """Shaped."""
    advantage: float
    """The same for every token of the response; 0 where the trainer computes advantages of tokens."""
    staleness: int
    """Policy version at consumption minus the oldest weight version in the response."""
    weight_spans: tuple[WeightSpan, ...]
    """Weight versions of the response's tokens."""

    @property
    def num_tokens(self) -> int:
        """Prompt plus response: what a forward costs."""
        return self.num_prompt_tokens + self.num_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Selection in one group: its samples, and counts of dropped responses by reason."""

    samples: tuple[TrainingSample, ...] = ()
    aborted: int = 0
    unscored: int = 0
    zero_variance: int = 0
    filtered: int = 0
    masked_truncated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """The stages that run on the controller."""

    filter: Loaded
    shaping: Loaded
    advantage: Loaded | None
    """None where the trainer computes advantages."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> "_Stages":
        on_trainer = isinstance(algorithm.advantage, AdvantageChoice) and algorithm.advantage.on_trainer
        advantage = None if on_trainer else load_stage(ADVANTAGES, algorithm.advantage)
        if advantage is not None and advantage.inputs not in (GroupOutcome, BatchOutcome):
            advantage = None
        return cls(
            filter=load_stage(FILTERS, algorithm.filter),
            shaping=load_stage(SHAPINGS, algorithm.reward_shaping),
            advantage=advantage,
        )

    def keeps(self, inputs: GroupOutcome | GroupSignal) -> bool:
        """Whether the filter keeps a group; true if it is a filter of other inputs."""
        return self.filter.inputs is not type(inputs) or bool(self.filter.function(inputs))

    def shaped(self, outcome: GroupOutcome) -> GroupOutcome:
        """The group with shaped rewards."""
        rewards = checked(self.shaping.function(outcome), outcome.rewards, key=SHAPINGS.key)
        return replace(outcome, rewards=rewards)

    def advantages(self, outcomes: Sequence[GroupOutcome]) -> list[Rewards | None]:
        """Advantages of every group; None where the trainer computes them."""
        if self.advantage is None or not outcomes:
            return [None] * len(outcomes)
        function = self.advantage.function
        if self.advantage.inputs is GroupOutcome:
            return [checked(function(outcome), outcome.rewards, key=ADVANTAGES.key) for outcome in outcomes]
        rewards = np.concatenate([outcome.rewards for outcome in outcomes])
        values = checked(function(BatchOutcome(groups=tuple(outcomes))), rewards, key=ADVANTAGES.key)
        return list(np.split(values, np.cumsum([len(outcome.rewards) for outcome in outcomes])[:-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """One group on its way."""

    scored: ScoredGroup
    indices: tuple[int, ...]
    """Responses that are neither aborted nor unscored."""
    outcome: GroupOutcome
    survey: Survey
    """Counts so far."""


def select(groups: Sequence[ScoredGroup], policy_version: int, *, algorithm: AlgorithmConfig) -> list[Survey]:
    """The selection in every group, in order.

    Raises ValueError for a reward that is not finite, a group whose parts disagree in size, a function that does not
    return one finite number per response, or an accuracy that the filter `accuracy` refuses.
    """
    stages = _Stages.of(algorithm)
    judged = [_judge(scored) for scored in groups]
    surveys = [each.survey for each in judged]
    kept: list[tuple[int, _Judged]] = []
    for number, each in enumerate(judged):
        if not each.indices:
            continue
        if stages.keeps(each.outcome):
            kept.append((number, replace(each, outcome=stages.shaped(each.outcome))))
        else:
            surveys[number] = _dropped(each, GroupSignal(outcome=each.outcome, advantages=None))
    values = stages.advantages([each.outcome for _, each in kept])
    for (number, each), advantages in zip(kept, values, strict=True):
        signal = GroupSignal(outcome=each.outcome, advantages=advantages)
        if stages.keeps(signal):
            surveys[number] = _sampled(each, signal, policy_version=policy_version, algorithm=algorithm)
        else:
            surveys[number] = _dropped(each, signal)
    return surveys


def has_signal(scored: ScoredGroup, algorithm: AlgorithmConfig) -> bool:
    """Whether `select` would train on a response of the group: the judgement of dynamic sampling.

    One group is judged alone, so an advantage over the batch is refused with dynamic sampling.
    """
    (survey,) = select([scored], 0, algorithm=algorithm)
    return bool(survey.samples)


def _judge(scored: ScoredGroup) -> _Judged:
    _check(scored)
    summary = scored.summary
    finished = [i for i, n in enumerate(summary.lengths) if n and summary.finish_reasons[i] is not FinishReason.ABORT]
    judged = tuple(i for i in finished if not scored.is_left_out(i))
    accuracies = [accuracy(score) for score in scored.scores] or scored.rewards
    outcome = GroupOutcome(
        rewards=np.array([scored.rewards[i] for i in judged], dtype=np.float64),
        accuracies=np.array([accuracies[i] for i in judged], dtype=np.float64),
        lengths=np.array([summary.lengths[i] for i in judged], dtype=np.int64),
        max_response_tokens=scored.group.sampling.max_response_tokens,
    )
    survey = Survey(aborted=len(summary.lengths) - len(finished), unscored=len(finished) - len(judged))
    return _Judged(scored=scored, indices=judged, outcome=outcome, survey=survey)


def _check(scored: ScoredGroup) -> None:
    group_id, num_responses = scored.group.group_id, len(scored.summary.lengths)
    sizes = (len(scored.rewards), len(scored.summary.finish_reasons), len(scored.summary.weight_spans))
    if any(size != num_responses for size in sizes):
        raise ValueError(
            f"group {group_id}: {num_responses} lengths, but {sizes} rewards, finish reasons and weight spans"
        )
    if not np.isfinite(scored.rewards).all():
        raise ValueError(f"group {group_id}: rewards {scored.rewards} must be finite")


def _dropped(judged: _Judged, signal: GroupSignal) -> Survey:
    if signal.is_zero:
        return replace(judged.survey, zero_variance=len(judged.indices))
    return replace(judged.survey, filtered=len(judged.indices))


def _sampled(judged: _Judged, signal: GroupSignal, *, policy_version: int, algorithm: AlgorithmConfig) -> Survey:
    rewards = signal.outcome.rewards
    advantages = np.zeros_like(rewards) if signal.advantages is None else signal.advantages
    reasons = judged.scored.summary.finish_reasons
    parts = part_numbers(judged.scored.summary.lengths)
    samples = tuple(
        _sample(
            judged.scored,
            index,
            part=parts[index],
            reward=reward,
            advantage=advantage,
            policy_version=policy_version,
        )
        for index, reward, advantage in zip(judged.indices, rewards.tolist(), advantages.tolist(), strict=True)
        if not (algorithm.mask_truncated and reasons[index].is_truncated)
    )
    return replace(judged.survey, samples=samples, masked_truncated=len(judged.indices) - len(samples))


def _sample(
    scored: ScoredGroup, index: int, *, part: int, reward: float, advantage: float, policy_version: int
) -> TrainingSample:
    summary = scored.summary
    return TrainingSample(
        group_id=scored.group.group_id,
        sample=index,
        part=part,
        columns=scored.columns[part],
        num_prompt_tokens=summary.num_prompt_tokens,
        num_response_tokens=summary.lengths[index],
        reward=reward,
        advantage=advantage,
        staleness=policy_version - min(span.weight_version for span in summary.weight_spans[index]),
        weight_spans=summary.weight_spans[index],
    )
