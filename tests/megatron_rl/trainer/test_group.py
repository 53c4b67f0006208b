"""Whom the controller finds late if it was stopped itself; over stand-ins for Ray's calls and a clock of the test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import ray

from history.patience import Patience
from megatron_rl.trainer import group as trainer_group
from megatron_rl.trainer.group import IDLE_TIMEOUT_S, LOOK_EVERY_S, SpmdGroup, TrainerGroup
from megatron_rl.trainer.messages import StepResult
from megatron_rl.trainer.trainer import Trainer
from rollout.failures import DeadlineError


@dataclass
class World:
    """A rank and a controller, which may be stopped in a look. It reads an answer a look after it was stopped."""

    answers_at: float = float("inf")
    stopped_in: dict[int, float] = field(default_factory=dict)
    now: float = 0.0
    num_looks: int = 0
    num_reads: int = 0
    exceptions = ray.exceptions

    def wait(self, refs: list[str], *, timeout: float, **_: object) -> tuple[list[str], list[str]]:
        stopped_s = self.stopped_in.get(self.num_looks, 0.0)
        answered = not stopped_s and self.now + timeout >= self.answers_at
        self.num_looks += 1
        self.now += timeout + stopped_s
        return (refs, []) if answered else ([], refs)

    def get(self, refs: object) -> object:
        self.num_reads += 1
        return refs

    def kill(self, actor: object, *, no_restart: bool) -> None:
        del actor, no_restart

    @property
    def process(self) -> "World":
        return self

    def remote(self) -> str:
        return "call"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[World, SpmdGroup]]:
    def start(**given: object) -> tuple[World, SpmdGroup]:
        world = World(**given)  # type: ignore[arg-type]
        monkeypatch.setattr(trainer_group, "ray", world)
        monkeypatch.setattr(trainer_group, "time", SimpleNamespace(monotonic=lambda: world.now))
        monkeypatch.setattr(trainer_group, "Patience", partial(Patience, clock=lambda: world.now))
        return world, SpmdGroup("trainer", [world], timeout_s=60.0)  # type: ignore[list-item]

    return start


def test_a_rank_that_answers_while_the_controller_is_stopped_is_not_late(
    started: Callable[..., tuple[World, SpmdGroup]],
) -> None:
    world, group = started(answers_at=30.0, stopped_in={4: 3600.0})
    assert group.call("process") == ["call"]
    assert world.now > 3600.0


def test_a_rank_that_does_not_answer_is_late_after_the_time_in_which_the_controller_waited(
    started: Callable[..., tuple[World, SpmdGroup]],
) -> None:
    world, group = started(stopped_in={4: 3600.0})
    with pytest.raises(DeadlineError, match=r"rank\(s\) \[0\] of 1 had not returned after 60 s"):
        group.call("process")
    assert world.now == 3660.0


def look_often(world: World, group: SpmdGroup) -> None:
    for _ in range(100):
        world.now += 5.0
        group.check_idle()


def test_an_idle_rank_is_not_judged_by_time_in_which_nobody_asked(
    started: Callable[..., tuple[World, SpmdGroup]],
) -> None:
    world, group = started()
    group.check_idle()
    for _ in range(10):
        world.now += 3600.0
        group.check_idle()
    begin = world.now
    with pytest.raises(DeadlineError, match="had not returned after 120 s"):
        look_often(world, group)
    assert world.now - begin <= IDLE_TIMEOUT_S


def test_the_answer_of_an_idle_rank_is_read_once(started: Callable[..., tuple[World, SpmdGroup]]) -> None:
    """A look at hundreds of ranks, many times a second, must not cost a read of each."""
    world, group = started(answers_at=0.0)
    for _ in range(9):
        world.now += 1.0
        group.check_idle()
    assert world.num_reads == 1
    world.now += LOOK_EVERY_S
    for _ in range(2):
        group.check_idle()
    assert world.num_reads == 2


def test_each_rank_trains_on_the_part_of_its_data_parallel_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data-parallel ranks of two tensor-parallel ranks each, as `megatron_rl.trainer.partition` numbers them."""
    given: list[tuple[object, ...]] = []
    results = [StepResult(metrics={"rank": rank}, num_optimizer_steps=1, num_skipped_updates=0) for rank in range(4)]

    def begin_each(method: str, arguments: Sequence[tuple[object, ...]]) -> str:
        given.extend(arguments)
        return method

    monkeypatch.setattr(trainer_group, "ray", SimpleNamespace(put=lambda part: part))
    ranks = SimpleNamespace(begin_each=begin_each, wait=lambda calls, method: results)
    group = TrainerGroup(ranks, data_ranks=[0, 0, 1, 1])  # type: ignore[arg-type]
    batch = SimpleNamespace(of_rank=lambda rank: f"part {rank}")
    assert group.train(batch) is results[-1]  # type: ignore[arg-type]
    assert given == [("part 0",), ("part 0",), ("part 1",), ("part 1",)]


def test_a_rank_refuses_the_part_of_another_rank() -> None:
    trainer, part = SimpleNamespace(data_rank=1), SimpleNamespace(data_rank=0)
    with pytest.raises(RuntimeError, match="data-parallel rank 1 received the part of data-parallel rank 0"):
        Trainer.train(trainer, part, lambda refs: refs)  # type: ignore[arg-type, return-value]
