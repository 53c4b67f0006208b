"""The four places that a group passes in the pool: waiting, generating, scoring, scored. No Ray.

    admit -> waiting -- start --> generating -- submit --> scoring -- complete --> scored -- take -->
                ^                      |
                +------ interrupt -----+         |
                +------------- lose -------------+

An interrupted group waits again, with the responses that its engine returned or with none. A group whose tokens were
lost with their node waits again with none.

Invariant (`check_integrity`): a group is in exactly one place. Each method moves a group by one place and raises
KeyError where the group is not in the place that it should leave.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rollout.types import ColumnsRef, GroupId, GroupSummary, PromptGroup, ScoredGroup

Call = Hashable
"""Reference of a remote call, a `ray.ObjectRef` in a run; used as a key only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The responses that an engine returned for a group; some may be unfinished."""

    summary: GroupSummary
    columns: tuple[ColumnsRef, ...]
    """As in `ScoredGroup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A group that no engine has."""

    group: PromptGroup
    sampled: Sampled | None = None
    """Of an interrupted group whose tokens survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generating:
    """A group that an engine samples."""

    group: PromptGroup
    engine: int
    incarnation: int
    """Of the engine (`EngineGroup.incarnations`): a call may fail after its engine was replaced."""
    columns: tuple[ColumnsRef, ...]
    """Handles of as many parts as the group can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A group whose responses are being scored."""

    group: PromptGroup
    sampled: Sampled
    scorer: int


@dataclass(slots=True, kw_only=True)
class GroupPlaces:
    """Where each group of a pool is. Read the four tables; only the methods change them."""

    waiting: dict[GroupId, Waiting] = field(default_factory=dict, init=False)
    generating: dict[Call, Generating] = field(default_factory=dict, init=False)
    """By the engine's call."""
    scoring: dict[Call, Scoring] = field(default_factory=dict, init=False)
    """By the scorer's call."""
    scored: dict[GroupId, ScoredGroup] = field(default_factory=dict, init=False)

    def groups(self) -> list[PromptGroup]:
        """All groups that were admitted and have not been taken."""
        return [
            *(item.group for item in self.waiting.values()),
            *(item.group for item in self.generating.values()),
            *(item.group for item in self.scoring.values()),
            *(item.group for item in self.scored.values()),
        ]

    def ids(self, purpose: str, step: int) -> list[GroupId]:
        """Numbers of the groups that were admitted for a purpose and a step, ascending."""
        return sorted(group.group_id for group in self.groups() if (group.purpose, group.step) == (purpose, step))

    def admit(self, groups: Sequence[PromptGroup]) -> None:
        """Groups wait from now on."""
        self.waiting.update((group.group_id, Waiting(group=group)) for group in groups)

    def start(
        self, group_id: GroupId, call: Call, *, engine: int, incarnation: int, columns: tuple[ColumnsRef, ...]
    ) -> None:
        """An engine begins or continues a waiting group."""
        item = self.waiting.pop(group_id)
        self.generating[call] = Generating(group=item.group, engine=engine, incarnation=incarnation, columns=columns)

    def interrupt(self, call: Call, sampled: Sampled | None = None) -> None:
        """A group waits again; without `sampled` it begins again at the prompt."""
        item = self.generating.pop(call)
        self.waiting[item.group.group_id] = Waiting(group=item.group, sampled=sampled)

    def submit(self, call: Call, scoring: Call, sampled: Sampled, *, scorer: int) -> None:
        """A scorer begins with a group whose engine has finished."""
        item = self.generating.pop(call)
        self.scoring[scoring] = Scoring(group=item.group, sampled=sampled, scorer=scorer)

    def lose(self, call: Call) -> PromptGroup:
        """The tokens of a group are lost before it was scored: it waits again, and begins at the prompt."""
        group = self.scoring.pop(call).group
        self.waiting[group.group_id] = Waiting(group=group)
        return group

    def complete(self, call: Call, scored: ScoredGroup) -> None:
        """A scorer has finished a group."""
        item = self.scoring.pop(call)
        self.scored[item.group.group_id] = scored

    def take(self, group_ids: Sequence[GroupId]) -> list[ScoredGroup]:
        """Scored groups leave the pool, in the given order."""
        return [self.scored.pop(group_id) for group_id in group_ids]

    def check_integrity(self) -> None:
        """Assert the invariant."""
        ids = [group.group_id for group in self.groups()]
        assert len(ids) == len(set(ids)), "a group is in two places"
