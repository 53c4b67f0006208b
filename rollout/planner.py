"""Decides which prompts are admitted, and when.

Synchronous today: step t's prompts are due at step t, all of them, and any engine may take any group.
The controller asks `due(step)` and knows nothing else of it.

Invariants: every step admits `prompts_per_step` groups; group numbers ascend in the order of admission
and are a function of the step, so a resumed run numbers its groups as an uninterrupted one; a prompt is
consumed at most as often as it was issued.
"""

from collections.abc import Iterable, Mapping

from rollout.prompt_order import OrderState, PromptOrder
from rollout.seeds import derive_seed
from rollout.types import GroupId, Prompt, PromptGroup, PromptId, SamplingSpec


class Planner:
    """Turns the endless order of prompts into each step's groups."""

    def __init__(
        self,
        order: PromptOrder,
        prompts: Mapping[PromptId, Prompt],
        *,
        prompts_per_step: int,
        group_size: int,
        sampling: SamplingSpec,
        seed: int,
    ) -> None:
        self._order = order
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step
        self._group_size = group_size
        self._sampling = sampling
        self._seed = seed

    def due(self, step: int) -> list[PromptGroup]:
        """The groups to admit before step `step` is rolled out, in the order in which engines should start them."""
        draws = self._order.take(self._prompts_per_step)
        return [
            self._group(step, GroupId(step * self._prompts_per_step + index), self._prompts[draw.prompt_id])
            for index, draw in enumerate(draws)
        ]

    def peek(self) -> list[Prompt]:
        """The prompts that the next `due` will admit, so that their history can be made ready."""
        return [self._prompts[draw.prompt_id] for draw in self._order.peek(self._prompts_per_step)]

    def _group(self, step: int, group_id: GroupId, prompt: Prompt) -> PromptGroup:
        return PromptGroup(
            group_id=group_id,
            step=step,
            prompt=prompt,
            sampling=self._sampling,
            seeds=tuple(
                derive_seed(self._seed, purpose="train", step=step, prompt_id=prompt.prompt_id, sample=sample)
                for sample in range(self._group_size)
            ),
        )

    def consumed(self, prompt_ids: Iterable[PromptId]) -> None:
        """Prompts whose groups were trained on or dropped: they are not issued again."""
        self._order.consume(prompt_ids)

    def state(self) -> OrderState:
        """What a checkpoint keeps."""
        return self._order.state()
