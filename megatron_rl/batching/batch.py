"""Builds the batch of a step from scored groups: samples by mini batch, rank and micro batch.

`megatron_rl.batching.selection` selects the samples; this module places them.

Pure: it reads lengths, rewards and versions, never tokens. The trainer rank that trains on a sample fetches its tokens
by the `columns` handle. The same groups, configuration and seed give the same batch in any order of arrival.

Placement of samples
* Groups stay whole: they are shuffled by the seed and cut into `num_mini_batches` runs of nearly equally many groups,
  so that advantages sum to zero within a mini batch. Fewer groups than mini batches give fewer mini batches.
* Epochs repeat the mini batches as they are, so a sample stays on its rank and its old log-probabilities with it.

Invariants (checked by one helper in every test)
1. every selected sample is in exactly one micro batch; dropped + trained responses = all responses
2. within a mini batch all data-parallel ranks have equally many micro batches, at least one; an empty one
   contributes neither loss nor gradient, but runs on a dummy token so that collectives match
3. a micro batch holds at most `max_micro_batch_tokens` tokens, or one single longer sample; padding for sequence
   parallelism comes on top
4. the denominators of a mini batch are the sums over all of its ranks
5. no mini batch is empty; a batch without samples has no mini batches, and the trainer skips the step
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.batching.balance import PackingRules, balance
from megatron_rl.batching.cost_model import CostModel
from megatron_rl.batching.selection import Survey, TrainingSample, select
from megatron_rl.config import AlgorithmConfig
from rollout.types import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples of one forward; may be empty."""

    samples: tuple[TrainingSample, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return sum(sample.num_tokens for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """Samples of one optimizer step."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """[data-parallel rank][micro batch]"""
    num_sequences: int
    """Denominator of sequence means: over all ranks."""
    num_response_tokens: int
    """Denominator of token means: over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """Metrics of a batch: selected and dropped responses, and how they are packed."""

    groups: int
    responses: int
    aborted_responses: int
    """Dropped because they are aborted or empty."""
    unscored_responses: int
    """Left out of their group because their scoring failed."""
    zero_variance_groups: int
    """Dropped by the filter and without signal: advantages are all zero, or rewards all equal."""
    zero_variance_responses: int
    """Responses of those groups."""
    filtered_groups: int
    """Dropped by the filter for another reason."""
    filtered_responses: int
    """Responses of those groups."""
    masked_truncated_responses: int
    """Left out of the loss because they reached the token limit."""
    trained_responses: int
    trained_tokens: int
    """Response tokens."""
    max_staleness: int
    """Largest staleness of trained responses; 0 if there are none."""
    mean_staleness: float
    micro_batches: int
    """Micro batches of one data-parallel rank in one epoch."""
    micro_batch_fill: float
    """Prompt and response tokens as a share of the room in all micro batches; 0 without micro batches."""
    rank_imbalance: float
    """Predicted time of the slowest data-parallel rank over the mean, minus 1, in the worst mini batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMiniBatch:
    """Samples of one optimizer step on one data-parallel rank."""

    micro_batches: tuple[MicroBatch, ...]
    num_sequences: int
    """Over all ranks."""
    num_response_tokens: int
    """Over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One step's training data of one data-parallel rank, as handles."""

    data_rank: int
    """Data-parallel rank that trains on it."""
    policy_version: int
    """At consumption."""
    mini_batches: tuple[RankMiniBatch, ...]
    """One epoch, in order."""
    max_staleness: int
    """Of all ranks' samples."""
    cap: float | None
    """As in `TrainBatch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One step's training data, as handles."""

    policy_version: int
    """At consumption."""
    mini_batches: tuple[MiniBatch, ...]
    """One epoch, in order; the trainer repeats it `num_epochs` times."""
    counts: BatchCounts
    cap: float | None = None
    """Cap of the correction in this step, where the guard has tightened it; None: as configured."""

    def of_rank(self, data_rank: int) -> RankBatch:
        """The part of one data-parallel rank.

        A rank that got the whole batch would hold a reference to every group's tokens, and the owner of the tokens, the
        controller, would have to know each of these references.
        """
        return RankBatch(
            data_rank=data_rank,
            policy_version=self.policy_version,
            mini_batches=tuple(
                RankMiniBatch(
                    micro_batches=mini.micro_batches[data_rank],
                    num_sequences=mini.num_sequences,
                    num_response_tokens=mini.num_response_tokens,
                )
                for mini in self.mini_batches
            ),
            max_staleness=self.counts.max_staleness,
            cap=self.cap,
        )


def build_batch(
    groups: Sequence[ScoredGroup],
    policy_version: int,
    *,
    algorithm: AlgorithmConfig,
    rules: PackingRules,
    seed: int,
) -> TrainBatch:
    """The batch of one step.

    Raises ValueError for a reward that is not finite, a group whose parts disagree in size, a function of the algorithm
    that does not return one finite number per response, or an accuracy that the filter `accuracy` refuses.
    """
    ordered = sorted(groups, key=lambda group: group.group.group_id)
    surveys = select(ordered, policy_version, algorithm=algorithm)
    surviving = [survey.samples for survey in surveys if survey.samples]
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(surviving))
    num_mini_batches = min(algorithm.num_mini_batches, len(surviving))
    runs = np.array_split(order, num_mini_batches) if num_mini_batches else []
    mini_batches = tuple(
        _mini_batch([sample for group in run for sample in surviving[int(group)]], rules) for run in runs
    )
    packing = _Packing.of(mini_batches, rules)
    return TrainBatch(
        policy_version=policy_version, mini_batches=mini_batches, counts=_counts(ordered, surveys, packing)
    )


def _mini_batch(samples: Sequence[TrainingSample], rules: PackingRules) -> MiniBatch:
    lengths = [sample.num_tokens for sample in samples]
    placed = balance(lengths, num_ranks=rules.num_ranks, max_tokens=rules.max_tokens, costs=rules.costs)
    return MiniBatch(
        micro_batches=tuple(
            tuple(MicroBatch(samples=tuple(samples[i] for i in indices)) for indices in rank) for rank in placed
        ),
        num_sequences=len(samples),
        num_response_tokens=sum(sample.num_response_tokens for sample in samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """How mini batches are packed; fields as in `BatchCounts`."""

    micro_batches: int
    fill: float
    imbalance: float

    @classmethod
    def of(cls, mini_batches: Sequence[MiniBatch], rules: PackingRules) -> "_Packing":
        micro_batches = sum(len(mini.micro_batches[0]) for mini in mini_batches)
        room = rules.max_tokens * sum(len(rank) for mini in mini_batches for rank in mini.micro_batches)
        held = sum(micro.num_tokens for mini in mini_batches for rank in mini.micro_batches for micro in rank)
        imbalances = [_imbalance(mini, rules.costs) for mini in mini_batches]
        return cls(micro_batches=micro_batches, fill=held / room if room else 0.0, imbalance=max(imbalances, default=0))


def _imbalance(mini: MiniBatch, costs: CostModel) -> float:
    times = [
        costs.rank_time([[sample.num_tokens for sample in micro.samples] for micro in rank])
        for rank in mini.micro_batches
    ]
    return max(times) / (sum(times) / len(times)) - 1


def _counts(groups: Sequence[ScoredGroup], surveys: Sequence[Survey], packing: _Packing) -> BatchCounts:
    trained = [sample for survey in surveys for sample in survey.samples]
    staleness = [sample.staleness for sample in trained] or [0]
    return BatchCounts(
        groups=len(groups),
        responses=sum(len(group.rewards) for group in groups),
        aborted_responses=sum(survey.aborted for survey in surveys),
        unscored_responses=sum(survey.unscored for survey in surveys),
        zero_variance_groups=sum(survey.zero_variance > 0 for survey in surveys),
        zero_variance_responses=sum(survey.zero_variance for survey in surveys),
        filtered_groups=sum(survey.filtered > 0 for survey in surveys),
        filtered_responses=sum(survey.filtered for survey in surveys),
        masked_truncated_responses=sum(survey.masked_truncated for survey in surveys),
        trained_responses=len(trained),
        trained_tokens=sum(sample.num_response_tokens for sample in trained),
        max_staleness=max(staleness),
        mean_staleness=sum(staleness) / len(staleness),
        micro_batches=packing.micro_batches,
        micro_batch_fill=packing.fill,
        rank_imbalance=packing.imbalance,
    )
