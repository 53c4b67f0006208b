"""Dynamic sampling: batches of a fixed number of groups with signal; groups without are replaced in the same step.

A group has signal if the trainer can learn from it. This is known when it is scored (`completed`). Groups form one
queue: by the version under which they started, then in order of admission. A batch is the shortest beginning of the
queue with `groups_per_step` groups with signal, and waits for each group before its end. It holds the groups without
signal, too: they count as consumed. So a group's place never depends on how fast it, or another, was sampled.

Amount. A version admits groups until the expected number with signal fills `overlap` + 1 batches. The expectation uses
the share of groups that recently had signal, and adds one standard deviation for the next batch. `refill` admits more
once the groups in the queue cannot fill the batch, whatever their results. A version admits at most `max_groups`; the
first one, which begins `overlap` steps more, as many for each. When they are used up, the batch has fewer groups with
signal (`num_missing`).

Age. The groups behind a batch stay for the next one if they are young enough. The others are `outdated`: they leave
untrained, with signal or without, and their prompts are sampled again. No group is outdated before it is scored, so
that no engine is interrupted; a batch waits for it. Without overlap, and in the last step, a batch waits for all.

Invariants (`check_refilled`, asserted in every test): every group leaves once, in a batch or outdated; a batch has
`groups_per_step` groups with signal, unless its version has admitted `max_groups`; no group exceeds `max_staleness`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace

from rollout.planning.plan import GroupForecast
from rollout.types import GroupId, ScoredGroup

DrawFurther = Callable[[int, Sequence[int], bool], Sequence[GroupForecast]]
"""Called with (version, for each group the step in which it is expected to be trained on, whether they are admitted).
Group numbers ascend. If they are not admitted, the next call returns the same prompts."""

MARGIN = 1.0
"""Standard deviations by which more groups are admitted for the next batch; with 1 it is full in 5 cases of 6."""
FORGET = 0.5
"""Weight of the past in the share of groups with signal, per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillRule:
    """Which groups count for a batch, and how many may be sampled for it."""

    max_groups: int
    """Most groups that a version admits: those of a step and their replacements."""
    has_signal: Callable[[ScoredGroup], bool]
    """Whether the trainer can learn from a group."""
    is_repeatable: bool = False
    """Nothing depends on the order in which groups end, nor on steps before a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillCounts:
    """What became of the groups of one batch, and of those behind it."""

    num_without_signal: int = 0
    """Consumed with the batch and not trained on."""
    num_missing: int = 0
    """Groups with signal that the batch lacks, because `max_groups` were admitted."""
    num_rounds: int = 0
    """Admissions after the first one of the version."""
    num_kept: int = 0
    """Groups with signal that wait for the next batch."""
    num_outdated: int = 0
    """Groups that left untrained because the next batch would be too late."""
    wasted_tokens: int = 0
    """Of the groups without signal and the outdated ones."""
    signal_share: float = 1.0
    """Recent share of groups with signal, by which the next groups are admitted."""


def refill_metrics(counts: RefillCounts) -> dict[str, float]:
    """Metrics of a step."""
    return {
        "refill/groups_without_signal": float(counts.num_without_signal),
        "refill/missing_groups": float(counts.num_missing),
        "refill/rounds": float(counts.num_rounds),
        "refill/kept_groups": float(counts.num_kept),
        "refill/outdated_groups": float(counts.num_outdated),
        "refill/wasted_tokens": float(counts.wasted_tokens),
        "refill/signal_share": counts.signal_share,
    }


@dataclass(slots=True, kw_only=True)
class _Open:
    """An admitted group that has not left."""

    started: int | None = None
    has_signal: bool | None = None
    """None before it is scored."""
    num_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class RefilledBatches:
    """As `rollout.planning.admission.Admission`, but told of signal. Only `upcoming` and `progress` do not mutate."""

    draw: DrawFurther
    num_steps: int
    groups_per_step: int
    max_groups: int
    overlap: int = 0
    max_staleness: int = 0
    is_repeatable: bool = False
    first_step: InitVar[int] = 0
    counts: RefillCounts = RefillCounts()
    """Of the last batch; complete after `outdated`."""
    _version: int = 0
    _budget: int = 0
    """Groups that the version may still admit."""
    _num_rounds: int = 0
    _open: dict[GroupId, _Open] = field(default_factory=dict)
    _num_unscored: int = 0
    _num_with_signal: int = 0
    """Of open groups, those that are scored and have signal."""
    _seen: float = 0.0
    _seen_with_signal: float = 0.0
    """Recently scored groups, the older the lighter."""
    _blocker: GroupId | None = None
    """The batch waits for this group."""

    def __post_init__(self, first_step: int) -> None:
        self._version = first_step
        self._budget = (self.overlap + 1) * self.max_groups

    def due(self, version: int) -> list[GroupForecast]:
        """Groups for the batches of `version` and of `overlap` more steps, as far as open groups do not fill them."""
        if version > self._version:
            self._version, self._budget, self._num_rounds = version, self.max_groups, 0
        return self._admit(version)

    def upcoming(self, version: int) -> list[GroupForecast]:
        """The groups that `due` would admit if no group were scored until then."""
        budget = self._budget if version == self._version else self.max_groups
        return list(self.draw(version, self._wanted(version, budget), False))

    def refill(self, version: int) -> list[GroupForecast]:
        """Further groups if the open ones cannot fill the batch; a repeatable run waits until all are scored."""
        possible = self._num_with_signal + self._num_unscored
        if possible >= self.groups_per_step or (self.is_repeatable and self._num_unscored):
            return []
        admitted = self._admit(version)
        self._num_rounds += bool(admitted)
        return admitted

    def started(self, group_id: GroupId, version: int) -> None:
        """An engine has begun a group. A restart keeps the version: tokens of the first start may remain."""
        group = self._open[group_id]
        group.started = version if group.started is None else group.started

    def completed(self, group_id: GroupId, *, has_signal: bool, num_tokens: int) -> None:
        """A group of that many response tokens is scored."""
        group = self._open[group_id]
        group.has_signal, group.num_tokens = has_signal, num_tokens
        self._num_unscored -= 1
        self._num_with_signal += has_signal
        self._seen += 1.0
        self._seen_with_signal += has_signal

    def batch(self, version: int) -> list[GroupId] | None:
        """The groups of batch `version`, with and without signal, in order of admission; None while it is incomplete.

        The batch has fewer groups with signal if the version may admit no more and all open groups are scored.
        """
        is_short = self._num_with_signal < self.groups_per_step
        if self._num_unscored and (is_short or self._waits_for_all(version)):
            return None
        if is_short and self._budget:
            return None
        if self._blocker is not None and self._open[self._blocker].has_signal is None:
            return None
        chosen, num_with_signal = list[GroupId](), 0
        for group_id in sorted(self._open, key=lambda one: (self._start(one, version), one)):
            is_needed = num_with_signal < self.groups_per_step
            if self._open[group_id].has_signal is None and (is_needed or self._is_outdated(group_id, version)):
                self._blocker = group_id
                return None
            if is_needed:
                chosen.append(group_id)
                num_with_signal += bool(self._open[group_id].has_signal)
        self._blocker = None
        self._count(chosen, num_with_signal)
        return sorted(chosen)

    def _count(self, chosen: Sequence[GroupId], num_with_signal: int) -> None:
        """The groups of a batch leave, and the share of groups with signal forgets."""
        wasted = [group for group in map(self._leave, chosen) if not group.has_signal]
        self.counts = RefillCounts(
            num_without_signal=len(wasted),
            num_missing=self.groups_per_step - num_with_signal,
            num_rounds=self._num_rounds,
            wasted_tokens=sum(group.num_tokens for group in wasted),
            signal_share=self._signal_share,
        )
        past = 0.0 if self.is_repeatable else FORGET
        self._seen, self._seen_with_signal = past * self._seen, past * self._seen_with_signal

    def outdated(self, version: int) -> list[GroupId]:
        """Once batch `version` is taken: the groups that would be too old for the next batch; they leave."""
        is_last = version >= self.num_steps - 1
        found = sorted(group_id for group_id in self._open if is_last or self._is_outdated(group_id, version))
        left = [self._leave(group_id) for group_id in found]
        self.counts = replace(
            self.counts,
            num_kept=self._num_with_signal,
            num_outdated=len(left),
            wasted_tokens=self.counts.wasted_tokens + sum(group.num_tokens for group in left),
        )
        return found

    def progress(self, version: int) -> tuple[int, int]:
        """(groups with signal, fewer than a batch while it is incomplete; groups of the batch that are trained on)"""
        return min(self._num_with_signal, self.groups_per_step - 1), self.groups_per_step

    @property
    def num_ahead(self) -> int:
        """Groups that are admitted and have not left."""
        return len(self._open)

    @property
    def _signal_share(self) -> float:
        """Expected share of groups with signal; 1 before any was scored."""
        return (self._seen_with_signal + 1) / (self._seen + 1)

    def _admit(self, version: int) -> list[GroupForecast]:
        admitted = list(self.draw(version, self._wanted(version, self._budget), True))
        self._budget -= len(admitted)
        self._num_unscored += len(admitted)
        self._open |= {group.group_id: _Open() for group in admitted}
        return admitted

    def _wanted(self, version: int, budget: int) -> list[int]:
        """For each group to admit, the step in which it is expected to be trained on."""
        share, size = self._signal_share, self.groups_per_step
        num_batches = min(self.overlap + 1, self.num_steps - version)
        if num_batches < 1:
            return []
        missing = max(size - self._num_with_signal, 0)
        margin = MARGIN * math.sqrt(missing * (1 - share))  # of the number with signal
        with_signal = max(missing + margin, num_batches * size - self._num_with_signal)
        count = min(max(math.ceil(with_signal / share) - self._num_unscored, 0), budget)
        before = self._num_with_signal + share * self._num_unscored
        return [
            min(version + math.floor((before + share * index) / size), version + num_batches - 1)
            for index in range(count)
        ]

    def _waits_for_all(self, version: int) -> bool:
        return self.overlap == 0 or version >= self.num_steps - 1

    def _start(self, group_id: GroupId, version: int) -> int:
        started = self._open[group_id].started
        return version if started is None else started

    def _is_outdated(self, group_id: GroupId, version: int) -> bool:
        started = self._open[group_id].started
        return started is not None and started + self.max_staleness <= version

    def _leave(self, group_id: GroupId) -> _Open:
        group = self._open.pop(group_id)
        self._num_with_signal -= bool(group.has_signal)
        return group


def check_refilled(
    batches: Sequence[Sequence[GroupId]],
    outdated: Sequence[GroupId],
    *,
    started: Mapping[GroupId, int],
    with_signal: Mapping[GroupId, bool],
    groups_per_step: int,
    max_staleness: int,
) -> None:
    """Assert the invariants of a run that had groups enough: `batches[u]` was taken at version u."""
    seen = [*(group_id for batch in batches for group_id in batch), *outdated]
    assert len(seen) == len(set(seen)), "a group left twice"
    assert set(seen) == set(started) == set(with_signal), "a group was lost, or left without having been sampled"
    for version, batch in enumerate(batches):
        trained = [group_id for group_id in batch if with_signal[group_id]]
        assert len(trained) == groups_per_step, f"batch {version} has {len(trained)} groups with signal"
        stale = max(version - started[group_id] for group_id in trained)
        assert stale <= max_staleness, f"batch {version} holds a group of staleness {stale}"
