"""Scorers in turn: each finished group goes to the next scorer.

Ray restarts a scorer that dies, and repeats its calls (`rollout.rewards.text_actor`). A scorer that hangs is killed, so
that the same happens. Both are counted.
"""

import logging
import time
from collections.abc import Iterable, Sequence

import ray

from rollout.failures import (
    CallError,
    Place,
    PlacedError,
    ProcessLostError,
    RewardBrokenError,
    brief,
    node_of,
)
from rollout.pool.group_places import Scoring
from rollout.processes import ProcessId
from rollout.remote_kill import kill_on_nodes
from rollout.types import ColumnsRef, PromptGroup, ScoredGroup, ScorerAnswer

_log = logging.getLogger(__name__)

_MARGIN_S = 120.0
"""Time of a scorer for a group beside its calls of the reward function: new workers, decoding."""


def scoring_timeout_s(group_sizes: Iterable[int], *, reward_timeout_s: float) -> float:
    """Longest time for one group: the largest one, a response after another, each up to `reward.timeout_s`."""
    return max(group_sizes) * reward_timeout_s + _MARGIN_S


class ScorerPool:
    """All scorers of a run. `submit` and `finish` mutate."""

    def __init__(self, scorers: Sequence[ray.actor.ActorHandle], *, timeout_s: float) -> None:
        """`scorers` are `rollout.rewards.text_actor.TextActor` handles.

        `timeout_s` is the longest time in which a scorer with groups finishes none.
        """
        self._scorers = tuple(scorers)
        self._next = 0
        self._timeout_s = timeout_s
        self._processes: dict[int, ProcessId] = {}
        """By scorer, the process that answered last."""
        self.num_restarts = 0
        """Scorers that died or hung, and answered again."""
        self._num_pending = [0] * len(self._scorers)
        self._waiting_since = [0.0] * len(self._scorers)

    def submit(self, group: PromptGroup, columns: ColumnsRef) -> tuple[ray.ObjectRef, int]:
        """Start scoring a finished group; returns the call and the number of its scorer."""
        number = self._next
        self._next = (self._next + 1) % len(self._scorers)
        if not self._num_pending[number]:
            self._waiting_since[number] = time.monotonic()
        self._num_pending[number] += 1
        return self._scorers[number].score.remote(group, columns), number

    def finish(self, ref: ray.ObjectRef, item: Scoring) -> ScoredGroup:
        """Return the group of a call that has ended.

        Errors name the group.

        Raises:
            RewardBrokenError: the reward function fails for every response.
            ProcessLostError: the scorer's process ended.
            CallError: the scorer raised something else.
        """
        self._num_pending[item.scorer] -= 1
        self._waiting_since[item.scorer] = time.monotonic()
        try:
            answer: ScorerAnswer = ray.get(ref)
        except ray.exceptions.RayError as error:
            place = Place(role="scorer", ranks=(item.scorer,), node=node_of(error))
            raise _kind(error)(f"scoring of group {item.group.group_id} failed: {brief(error)}", place) from error
        before = self._processes.get(item.scorer, answer.process)
        self.num_restarts += answer.process != before
        self._processes[item.scorer] = answer.process
        return ScoredGroup(
            group=item.group,
            summary=item.sampled.summary,
            rewards=tuple(score.reward for score in answer.scores),
            scores=answer.scores,
            columns=item.sampled.columns,
        )

    def check(self) -> None:
        """Kill scorers that hang. Call it while groups are waited for, after those that have ended are finished."""
        now = time.monotonic()
        for number, num_pending in enumerate(self._num_pending):
            if not num_pending or now - self._waiting_since[number] <= self._timeout_s:
                continue
            _log.warning(
                "scorer %d has %d groups and has finished none for %.0f s, although `reward.timeout_s` limits every "
                "response; the scorer is restarted, and its log has the stacks of its threads",
                *(number, num_pending, self._timeout_s),
            )
            if number in self._processes:
                kill_on_nodes([self._processes[number]], stacks=True)
            else:  # it has never answered
                ray.kill(self._scorers[number], no_restart=False)
            self._waiting_since[number] = time.monotonic()


def _kind(error: ray.exceptions.RayError) -> type[PlacedError]:
    if isinstance(error, RewardBrokenError):
        return RewardBrokenError
    return ProcessLostError if isinstance(error, ray.exceptions.RayActorError) else CallError
