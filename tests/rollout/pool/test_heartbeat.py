"""When a process counts as silent; over a stand-in for Ray's calls and a clock of the test."""

from dataclasses import dataclass, field, replace

import pytest
import ray

from rollout.pool import heartbeat
from rollout.pool.heartbeat import LOOK_EVERY_S, SILENT_S, START_S, Heartbeat
from rollout.processes import ProcessId

PROCESS = ProcessId(node_id="id", pid=7, start_ticks=5, host="gpu-03")


@dataclass
class Actor:
    """Answers each call, fails it, or stays silent."""

    says: str = "alive"
    num_asked: int = 0
    now: float = 0.0
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def alive(self) -> "Actor":
        return self

    def remote(self) -> str:
        self.num_asked += 1
        self.answers[f"call {self.num_asked}"] = self.says
        return f"call {self.num_asked}"

    def wait(self, refs: list[str], *, timeout: float) -> tuple[list[str], list[str]]:
        assert timeout == 0, "the heartbeat never waits"
        done = [ref for ref in refs if self.answers[ref] != "silent"]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str) -> ProcessId:
        if self.answers[ref] == "dead":
            raise ray.exceptions.RayActorError
        return PROCESS

    def seconds_until_missed(self, beat: Heartbeat, most: float) -> float | None:
        begin = self.now
        while self.now - begin < most:
            self.now += 1.0
            if beat.missed():
                return self.now - begin
        return None


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    actor = Actor()
    monkeypatch.setattr(heartbeat.ray, "wait", actor.wait)
    monkeypatch.setattr(heartbeat.ray, "get", actor.get)
    return actor


def test_a_process_that_answers_is_never_missed_and_is_asked_every_few_seconds(actor: Actor) -> None:
    assert actor.seconds_until_missed(Heartbeat(actor, clock=lambda: actor.now), 3600.0) is None
    assert actor.num_asked == pytest.approx(3600.0 / LOOK_EVERY_S, abs=2)


def test_a_silent_process_is_missed_once_and_its_successor_has_the_time_of_a_start(actor: Actor) -> None:
    beat = Heartbeat(actor, clock=lambda: actor.now)
    assert actor.seconds_until_missed(beat, 100.0) is None
    actor.says = "silent"
    assert actor.seconds_until_missed(beat, 2 * SILENT_S) == pytest.approx(SILENT_S, abs=2 * LOOK_EVERY_S)
    assert actor.seconds_until_missed(beat, 2 * START_S) == pytest.approx(START_S, abs=2 * LOOK_EVERY_S)
    actor.says = "alive"
    actor.seconds_until_missed(beat, 4 * LOOK_EVERY_S)
    actor.says = "silent"
    assert actor.seconds_until_missed(beat, 2 * SILENT_S) == pytest.approx(SILENT_S, abs=4 * LOOK_EVERY_S)


def test_a_process_that_died_has_the_time_of_a_start_however_often_a_call_fails(actor: Actor) -> None:
    beat = Heartbeat(actor, clock=lambda: actor.now)
    actor.says = "dead"
    assert actor.seconds_until_missed(beat, 2 * START_S) == pytest.approx(START_S, abs=4 * LOOK_EVERY_S)


def test_time_in_which_nobody_waits_does_not_count(actor: Actor) -> None:
    beat = Heartbeat(actor, clock=lambda: actor.now)
    beat.missed()
    actor.says = "silent"
    for _ in range(4):
        actor.now += 3600.0
        assert not beat.missed()


@dataclass
class Ended:
    """What was ended, and how."""

    by_ray: list[object] = field(default_factory=list)
    by_node: list[tuple[list[ProcessId], bool]] = field(default_factory=list)

    def kill(self, actor: object, *, no_restart: bool) -> None:
        assert not no_restart, "a run needs the actor"
        self.by_ray.append(actor)

    def kill_on_nodes(self, processes: list[ProcessId], *, stacks: bool) -> tuple[str, ...]:
        self.by_node.append((processes, stacks))
        return ("logs/stacks",)


@pytest.fixture
def killed_by_beats(monkeypatch: pytest.MonkeyPatch) -> Ended:
    ended = Ended()
    monkeypatch.setattr(heartbeat.ray, "kill", ended.kill)
    monkeypatch.setattr(heartbeat, "kill_on_nodes", ended.kill_on_nodes)
    return ended


def test_a_silent_process_that_was_asked_before_is_named_with_its_node_and_leaves_its_stacks(
    actor: Actor, killed_by_beats: Ended
) -> None:
    beat = Heartbeat(actor, clock=lambda: actor.now)
    beat.ask()
    actor.says = "silent"
    assert (beat.named("scorer 2"), beat.host) == ("scorer 2", "")
    assert actor.seconds_until_missed(beat, 2 * SILENT_S) == pytest.approx(SILENT_S, abs=2 * LOOK_EVERY_S)
    assert (beat.named("scorer 2"), beat.host) == ("scorer 2 (process 7 on gpu-03)", "gpu-03")
    assert beat.end() == ("logs/stacks",)
    assert (killed_by_beats.by_node, killed_by_beats.by_ray) == ([([PROCESS], True)], [])


@pytest.mark.parametrize("before", ["silent", "dead", "ended"])
def test_ray_ends_a_process_that_is_not_known(actor: Actor, killed_by_beats: Ended, before: str) -> None:
    beat = Heartbeat(actor, clock=lambda: actor.now)
    if before == "ended":
        actor.seconds_until_missed(beat, 4 * LOOK_EVERY_S)
        beat.end()
        killed_by_beats.by_node.clear()
    actor.says = "dead" if before == "dead" else "silent"
    actor.seconds_until_missed(beat, 2 * START_S)
    assert beat.end() == ()
    assert (killed_by_beats.by_node, killed_by_beats.by_ray) == ([], [actor])


def test_the_answer_of_an_old_process_does_not_hide_its_successor(actor: Actor) -> None:
    beat = Heartbeat(actor, clock=lambda: actor.now)
    successor = replace(PROCESS, pid=8, start_ticks=6)
    for process in (PROCESS, successor, PROCESS):
        beat.note(process)
    assert beat.process == successor


def test_starts_on_two_nodes_are_not_compared(actor: Actor) -> None:
    """A machine that booted later counts fewer ticks."""
    beat = Heartbeat(actor, clock=lambda: actor.now)
    elsewhere = replace(PROCESS, node_id="other", start_ticks=PROCESS.start_ticks - 1)
    for process in (PROCESS, elsewhere):
        beat.note(process)
    assert beat.process == elsewhere
