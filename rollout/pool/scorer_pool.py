"""Each finished group goes to the scorer with the fewest responses.

Ray restarts a scorer that dies, and repeats its calls (`rollout.rewards.text_actor`). A scorer that hangs is killed, so
that the same happens: one whose process does not answer, and one that finishes no group. All are counted.
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
    TokensLostError,
    brief,
    node_of,
)
from rollout.pool.group_places import Scoring
from rollout.pool.heartbeat import LOOK_EVERY_S, Heartbeat
from rollout.processes import ProcessId
from rollout.types import ColumnsRef, PromptGroup, ScoredGroup, ScorerAnswer, WorkerEvents

_log = logging.getLogger(__name__)

_MARGIN_S = 120.0
"""Time of a scorer for a group beside its calls of the reward function: new workers, grace, decoding."""


def scoring_timeout_s(group_sizes: Iterable[int], *, reward_timeout_s: float) -> float:
    """Longest time in which a scorer that has groups finishes none.

    Calls of its oldest group are begun first. In the worst case one worker takes one after another, each up to
    `reward.timeout_s`, after they had shared a worker that was killed.
    """
    return (max(group_sizes) + 1) * reward_timeout_s + _MARGIN_S


class ScorerPool:
    """All scorers of a run. `submit` and `finish` mutate."""

    def __init__(self, scorers: Sequence[ray.actor.ActorHandle], *, timeout_s: float) -> None:
        """`scorers` are `rollout.rewards.scorer_actor.ScorerActor` handles.

        `timeout_s` is the longest time in which a scorer with groups finishes none.
        """
        self._scorers = tuple(scorers)
        self._timeout_s = timeout_s
        self._heartbeats = [Heartbeat(scorer) for scorer in self._scorers]
        self._processes: list[set[ProcessId]] = [set() for _ in self._scorers]
        """By scorer, all processes that have answered; an old one may answer after its successor."""
        self.events = WorkerEvents()
        """Of the reward workers of all scorers."""
        self._num_pending = [0] * len(self._scorers)
        self._num_responses = [0] * len(self._scorers)
        """By scorer, responses of the pending groups."""
        self._silent_s = [0.0] * len(self._scorers)
        """By scorer, time in which it had groups, somebody waited, and it finished none."""
        self._checked_s = time.monotonic()

    @property
    def num_restarts(self) -> int:
        """Scorers that died or hung, and answered again."""
        return sum(len(processes) - 1 for processes in self._processes if processes)

    def submit(self, group: PromptGroup, columns: Sequence[ColumnsRef]) -> tuple[ray.ObjectRef, int]:
        """Start scoring a finished group; returns the call and the number of its scorer."""
        number = min(range(len(self._scorers)), key=self._num_responses.__getitem__)
        self._num_responses[number] += len(group.seeds)
        if not self._num_pending[number]:
            self._silent_s[number] = 0.0
        self._num_pending[number] += 1
        return self._scorers[number].score.remote(group, *columns), number

    def finish(self, ref: ray.ObjectRef, item: Scoring) -> ScoredGroup:
        """Return the group of a call that has ended.

        Errors name the group.

        Raises:
            RewardBrokenError: the reward function fails for every response.
            ProcessLostError: the scorer's process ended.
            TokensLostError: the node that held the group's tokens is lost.
            CallError: the scorer raised something else.
        """
        self._num_pending[item.scorer] -= 1
        self._num_responses[item.scorer] -= len(item.group.seeds)
        self._silent_s[item.scorer] = 0.0
        try:
            answer: ScorerAnswer = ray.get(ref)
        except ray.exceptions.RayError as error:
            place = Place(role="scorer", ranks=(item.scorer,), node=node_of(error))
            raise _kind(error)(f"scoring of group {item.group.group_id} failed: {brief(error)}", place) from error
        earlier = self._processes[item.scorer]
        if earlier and answer.process not in earlier:
            _log.warning("scorer %d died or was killed; %s has taken its place", item.scorer, answer.process)
        earlier.add(answer.process)
        self._heartbeats[item.scorer].note(answer.process)
        self.events += answer.events
        return ScoredGroup(
            group=item.group,
            summary=item.sampled.summary,
            rewards=tuple(score.reward for score in answer.scores),
            scores=answer.scores,
            columns=item.sampled.columns,
        )

    def check(self) -> None:
        """Kill scorers that hang. Call it while groups are waited for, after those that have ended are finished."""
        waited_s = min(time.monotonic() - self._checked_s, 2 * LOOK_EVERY_S)  # longer: nobody waited
        self._checked_s = time.monotonic()
        for number, num_pending in enumerate(self._num_pending):
            if not num_pending:
                continue
            heartbeat = self._heartbeats[number]
            if heartbeat.process is not None:  # one that starts has the time of a start
                self._silent_s[number] += waited_s
            if self._silent_s[number] > self._timeout_s:
                why = f"finished none for {self._timeout_s:.0f} s, although `reward.timeout_s` limits every response"
            elif silent_s := heartbeat.missed():
                why = f"has not answered for {silent_s:.0f} s"
            else:
                continue
            self._end(number, f"has {num_pending} groups and {why}")
            self._silent_s[number] = 0.0

    def _end(self, number: int, why: str) -> None:
        """Write the stacks of a scorer that hangs, and kill it; Ray restarts it."""
        heartbeat = self._heartbeats[number]
        _log.warning("%s %s; the scorer is restarted", heartbeat.named(f"scorer {number}"), why)
        if folders := heartbeat.end():
            _log.warning("the stacks of scorer %d are in %s", number, ", ".join(folders))


def _kind(error: ray.exceptions.RayError) -> type[PlacedError]:
    if isinstance(error, RewardBrokenError):
        return RewardBrokenError
    if isinstance(error, ray.exceptions.ObjectLostError):
        return TokensLostError
    return ProcessLostError if isinstance(error, ray.exceptions.RayActorError) else CallError
