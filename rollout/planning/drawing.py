"""Draws prompts from their order and makes numbered groups of them, with seeds.

Whole steps (`of_step`) are drawn in advance: group i of step t has the number t * `prompts_per_step` + i. With dynamic
sampling groups are drawn as needed (`further`): group i that version v admits has the number v * `most_by_version` + i.
One object draws in one of the two ways, because their numbers and seeds are the same.

Invariants: numbers and seeds depend only on the step, or the version, for which a group was drawn, so a resumed run
numbers groups like an uninterrupted run; a prompt is consumed at most as often as it was issued.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from rollout.data.order import Draw, OrderState, PromptOrder
from rollout.seeds import derive_seed
from rollout.types import GroupId, Prompt, PromptGroup, PromptId, SamplingSpec


@dataclass(slots=True, kw_only=True)
class GroupDraws:
    """The groups that were drawn and have not left. All methods but `state` mutate."""

    order: PromptOrder
    prompts: Mapping[PromptId, Prompt]
    prompts_per_step: int
    most_by_version: int
    """Most groups that `further` draws for one version; 0 if whole steps are drawn."""
    group_size: int
    sampling: SamplingSpec
    seed: int
    first_step: InitVar[int] = 0
    groups: dict[GroupId, PromptGroup] = field(default_factory=dict)
    """By number: drawn and neither consumed nor put back."""
    _steps: dict[int, tuple[PromptGroup, ...]] = field(default_factory=dict)
    _version: int = 0
    _num_of_version: int = 0
    """Groups that `further` has drawn for the version."""
    _seen: Counter[PromptId] = field(default_factory=Counter)
    """How often it has drawn each prompt for the version."""

    def __post_init__(self, first_step: int) -> None:
        self._version = first_step

    def of_step(self, step: int) -> tuple[PromptGroup, ...]:
        """The groups of a step, drawn at the first call; steps are drawn in order."""
        assert not self.most_by_version, "with dynamic sampling, groups are drawn by `further`"
        if step not in self._steps:
            first = step * self.prompts_per_step
            self._steps[step] = self._made(self.order.take(self.prompts_per_step), step, first, Counter())
            self._issue(self._steps[step])
        return self._steps[step]

    def further(self, version: int, count: int, *, is_issued: bool) -> tuple[PromptGroup, ...]:
        """The next groups, for a version; unless they are issued, the next call returns the same prompts."""
        assert self.most_by_version, "without dynamic sampling, groups are drawn by `of_step`"
        if version > self._version:
            self._version, self._num_of_version, self._seen = version, 0, Counter()
        draws = self.order.take(count) if is_issued else self.order.peek(count)
        first = version * self.most_by_version + self._num_of_version
        seen = self._seen if is_issued else self._seen.copy()
        groups = self._made(draws, version, first, seen)
        if is_issued:
            self._num_of_version += count
            self._issue(groups)
        return groups

    def consume(self, group_ids: Sequence[GroupId], version: int) -> list[PromptGroup]:
        """Groups leave, and their prompts are not issued again. `version`: the newest one."""
        left = self._leave(group_ids)
        self.order.consume(group.prompt.prompt_id for group in left)
        alive = {group.step for group in self.groups.values()}
        self._steps = {step: groups for step, groups in self._steps.items() if step in alive or step > version}
        return left

    def put_back(self, group_ids: Sequence[GroupId]) -> list[PromptGroup]:
        """Groups leave, and their prompts are issued again before all others."""
        left = self._leave(group_ids)
        self.order.put_back(group.prompt.prompt_id for group in left)
        return left

    def state(self) -> OrderState:
        """The part of a checkpoint about the order of prompts."""
        return self.order.state()

    def _issue(self, groups: Iterable[PromptGroup]) -> None:
        self.groups.update((group.group_id, group) for group in groups)

    def _leave(self, group_ids: Sequence[GroupId]) -> list[PromptGroup]:
        return [self.groups.pop(group_id) for group_id in group_ids]

    def _made(self, draws: Sequence[Draw], step: int, first: int, seen: Counter[PromptId]) -> tuple[PromptGroup, ...]:
        groups = []
        for index, draw in enumerate(draws):
            groups.append(self._group(step, GroupId(first + index), draw.prompt_id, seen[draw.prompt_id]))
            seen[draw.prompt_id] += 1
        return tuple(groups)

    def _group(self, step: int, group_id: GroupId, prompt_id: PromptId, occurrence: int) -> PromptGroup:
        seeds = (
            derive_seed(
                self.seed, purpose="train", step=step, prompt_id=prompt_id, sample=sample, occurrence=occurrence
            )
            for sample in range(self.group_size)
        )
        return PromptGroup(
            group_id=group_id,
            step=step,
            prompt=self.prompts[prompt_id],
            sampling=self.sampling,
            seeds=tuple(seeds),
            occurrence=occurrence,
        )
