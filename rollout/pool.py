"""All engines of a run behind one queue: groups go in, scored groups come out.

Groups are placed whole. An engine is given a new group when it has fewer response slots in use than it
decodes at once, so that engines which finish early draw more: the queue itself balances. The exception
is a deterministic run (`whole_step=True`), where everything admitted is handed over before the engine
samples its first token, because the composition of a batch must not depend on timing.

A group passes three places, each in exactly one of `_queue`, `_generating`, `_scoring`, `_scored`;
`check_integrity` asserts it. Only references to tokens pass through here.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray

from rollout.types import ColumnsRef, GroupId, GroupSummary, PromptGroup, Score, ScoredGroup

Progress = Callable[[int, int], None]
"""Called with (groups finished, groups wanted) whenever a group is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generating:
    group: PromptGroup
    engine: int
    columns: ray.ObjectRef


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    group: PromptGroup
    summary: GroupSummary
    columns: ray.ObjectRef


class EnginePool:
    """Engines and scorers of a run, driven by the controller."""

    def __init__(
        self,
        engines: Sequence[ray.actor.ActorHandle],
        scorers: Sequence[ray.actor.ActorHandle],
        *,
        slots_per_engine: int,
        whole_step: bool = False,
    ) -> None:
        """`engines` are `rollout.engine.EngineActor`, `scorers` are `rollout.scoring.ScorerActor` handles."""
        self._engines = tuple(engines)
        self._scorers = tuple(scorers)
        self._slots = slots_per_engine
        self._whole_step = whole_step
        self._queue: deque[PromptGroup] = deque()
        self._generating: dict[ray.ObjectRef, _Generating] = {}
        self._scoring: dict[ray.ObjectRef, _Scoring] = {}
        self._scored: dict[GroupId, ScoredGroup] = {}
        self._scores: dict[GroupId, tuple[Score, ...]] = {}
        self._next_scorer = 0

    def admit(self, groups: Sequence[PromptGroup]) -> None:
        """Queue `groups`, in order, and start as many as there is room for."""
        self._queue.extend(groups)
        if self._whole_step:
            (engine,) = self._engines
            ray.get(engine.hold.remote())
            entering = list(self._queue)
            while self._queue:
                self._start(self._queue.popleft(), engine=0)
            # calls may overtake each other on their way, so the engine is told whom to wait for, and in which order
            ray.get(engine.release.remote([group.group_id for group in entering]))
        else:
            self._dispatch()

    def take(self, purpose: str, step: int, *, progress: Progress | None = None) -> list[ScoredGroup]:
        """Wait until every admitted group of (`purpose`, `step`) is scored; they leave the pool, in order of admission.

        Raises:
            RuntimeError: an engine or a scorer died or raised; the error names it and the group.
        """
        wanted = sorted(group.group_id for group in self._admitted() if (group.purpose, group.step) == (purpose, step))
        while missing := sum(group_id not in self._scored for group_id in wanted):
            if progress is not None:
                progress(len(wanted) - missing, len(wanted))
            self._advance()
        if progress is not None:
            progress(len(wanted), len(wanted))
        return [self._scored.pop(group_id) for group_id in wanted]

    def check_integrity(self) -> None:
        """Assert that every group is in exactly one place and that no engine holds more than its slots allow."""
        ids = [group.group_id for group in self._admitted()]
        assert len(ids) == len(set(ids)), "a group is in two places"
        if not self._whole_step:
            for engine in range(len(self._engines)):
                held = [item.group for item in self._generating.values() if item.engine == engine]
                assert len(held) <= 1 or self._load(engine) - len(held[-1].seeds) < self._slots

    def _admitted(self) -> list[PromptGroup]:
        return [
            *self._queue,
            *(item.group for item in self._generating.values()),
            *(item.group for item in self._scoring.values()),
            *(scored.group for scored in self._scored.values()),
        ]

    def _load(self, engine: int) -> int:
        return sum(len(item.group.seeds) for item in self._generating.values() if item.engine == engine)

    def _dispatch(self) -> None:
        while self._queue:
            engine = min(range(len(self._engines)), key=self._load)
            if self._load(engine) >= self._slots:
                return
            self._start(self._queue.popleft(), engine=engine)

    def _start(self, group: PromptGroup, *, engine: int) -> None:
        summary, columns = self._engines[engine].generate_group.options(num_returns=2).remote(group)
        self._generating[summary] = _Generating(group=group, engine=engine, columns=columns)

    def _advance(self) -> None:
        waiting = [*self._generating, *self._scoring]
        ready, _ = ray.wait(waiting, num_returns=1, fetch_local=False)
        more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        for ref in {*ready, *more}:
            if ref in self._generating:
                self._finish_generating(ref)
            else:
                self._finish_scoring(ref)
        self._dispatch()

    def _finish_generating(self, ref: ray.ObjectRef) -> None:
        item = self._generating.pop(ref)
        try:
            summary: GroupSummary = ray.get(ref)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"engine {item.engine}: group {item.group.group_id} failed: {error}") from error
        scorer = self._scorers[self._next_scorer]
        self._next_scorer = (self._next_scorer + 1) % len(self._scorers)
        score = scorer.score.remote(item.group, item.columns)
        self._scoring[score] = _Scoring(group=item.group, summary=summary, columns=item.columns)

    def _finish_scoring(self, ref: ray.ObjectRef) -> None:
        item = self._scoring.pop(ref)
        try:
            scores: tuple[Score, ...] = ray.get(ref)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"scoring of group {item.group.group_id} failed: {error}") from error
        self._scored[item.group.group_id] = ScoredGroup(
            group=item.group,
            summary=item.summary,
            rewards=tuple(score.reward for score in scores),
            scores=scores,
            columns=ColumnsRef(item.columns),
        )
