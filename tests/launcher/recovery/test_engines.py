"""The order in which lost engines are brought back beside a trainer, over stand-ins for processes and devices."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from launcher.errors import LaunchError
from launcher.recovery.engines import EngineRestarter, LostEngines
from launcher.recovery.restart_limit import WINDOW_STEPS, RestartLimit
from rollout.config import EngineConfig
from rollout.failures import DeadlineError, EnginesLostError, Place, PlacedError, ProcessLostError

NUM_ENGINES = 3


class Engines:
    """An `EngineGroup`; those of `hung` are found when ranks are asked."""

    def __init__(self, log: list[str], lost: tuple[int, ...], hung: tuple[int, ...]) -> None:
        self.log, self.lost, self.hung, self.retired = log, lost, hung, ()
        self.actors = [f"actor {number}" for number in range(NUM_ENGINES)]

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(number for number in range(NUM_ENGINES) if number not in self.lost)

    def __len__(self) -> int:
        return NUM_ENGINES

    def end_silent(self, *, timeout_s: float) -> None:
        del timeout_s
        self.lost = tuple(sorted({*self.lost, *self.hung}))

    def check_alive(self, *, timeout_s: float) -> None:
        del timeout_s

    def loss_reason(self, number: int) -> str:
        return f"{number} died"

    def replace(self, number: int, group: object) -> None:
        self.log.append(f"replace {number} by {group.name}")
        self.lost = tuple(other for other in self.lost if other != number)


def restarter(log: list[str], *, lost=(1,), hung=(), shares: bool = True, drafts: bool = True) -> EngineRestarter:
    def note(text: str) -> Callable[..., None]:
        return lambda *args, **kwargs: log.append(text)

    def begin_engines(specs, slots):
        (spec,), (slot,) = specs, slots
        assert spec.number == slot.number
        log.append(f"begin {slot.number}")
        group = SimpleNamespace(name=f"new {slot.number}", finish_start=note(f"new {slot.number} has started"))
        return group, None

    slots = tuple(SimpleNamespace(number=number, node="") for number in range(NUM_ENGINES))
    engines = LostEngines(
        running=SimpleNamespace(end=lambda actors: log.append(f"end {actors}"), begin_engines=begin_engines),
        engines=Engines(log, lost, hung),
        specs=[SimpleNamespace(number=number, config=EngineConfig()) for number in range(NUM_ENGINES)],
        nodes=SimpleNamespace(
            placement=SimpleNamespace(engines=slots, retired=()), unplaced="", follow=lambda suspects=(): None
        ),
        limit=RestartLimit(max_restarts=9, newest_step=lambda: 0),
        say=lambda line: None,
        check_model=lambda number, group: log.append(f"{group.name} is compared as {number}"),
    )
    sharing = SimpleNamespace(
        to_start=note("devices are freed"), follow=lambda group: log.append(f"{group.name} follows the others")
    )
    return EngineRestarter(
        lost=engines,
        delivery=SimpleNamespace(connect=note("trainer and engines connect")),
        history=SimpleNamespace(connect=note("history connects")) if drafts else None,
        sharing=sharing if shares else None,
    )


def test_devices_are_freed_before_an_engine_starts_and_it_follows_the_others_before_it_is_connected() -> None:
    log: list[str] = []
    assert restarter(log, lost=(1, 2)).restart_lost() == 2
    assert log == [
        "devices are freed",
        "end ['actor 1', 'actor 2']",
        "begin 1",
        "begin 2",
        "new 1 has started",
        "new 1 is compared as 1",
        "new 1 follows the others",
        "replace 1 by new 1",
        "new 2 has started",
        "new 2 is compared as 2",
        "new 2 follows the others",
        "replace 2 by new 2",
        "trainer and engines connect",
        "history connects",
    ]


def test_without_shared_devices_or_drafts_a_restarted_engine_is_only_connected() -> None:
    log: list[str] = []
    assert restarter(log, shares=False, drafts=False).restart_lost() == 1
    assert log == [
        *("end ['actor 1']", "begin 1", "new 1 has started", "new 1 is compared as 1", "replace 1 by new 1"),
        "trainer and engines connect",
    ]


def test_a_restarted_engine_with_another_model_takes_no_place_and_is_not_connected() -> None:
    """A publish would not show it: names and shapes are right, and a small difference hides in the probe's bound."""
    log: list[str] = []
    some = restarter(log)

    def refuse(number: int, group: object) -> None:
        raise LaunchError(f"engine {number} has built another model")

    some.lost.check_model = refuse
    with pytest.raises(LaunchError, match="engine 1 has built another model"):
        some.restart_lost()
    assert log[-1] == "new 1 has started"


@pytest.mark.parametrize("asks", [False, True])
def test_an_engine_that_hangs_is_restarted_only_if_ranks_are_asked(asks: bool) -> None:
    log: list[str] = []
    assert restarter(log, lost=(), hung=(2,)).restart_lost(ask_ranks=asks) == asks
    assert ("begin 2" in log, bool(log)) == (asks, asks)


ENGINE = ProcessLostError("engine 2: init_transport failed", Place(role="engine", ranks=(2,)))


def failing(some: EngineRestarter, log: list[str], error: PlacedError, *, times: int) -> None:
    """Joining channels fails so often; engine 2 hangs from the first time on."""

    def connect() -> None:
        log.append("connect")
        some.lost.engines.hung = (2,)
        if log.count("connect") <= times:
            raise error

    some.delivery.connect = connect


@pytest.mark.parametrize("error", [ENGINE, DeadlineError("engine 2 is late", ENGINE.place)])
def test_an_engine_that_is_lost_while_channels_are_joined_is_restarted_too_and_all_are_joined_again(error) -> None:
    log: list[str] = []
    some = restarter(log, shares=False)
    failing(some, log, error, times=1)
    assert some.restart_lost() == 2
    assert some.num_restarts == 2
    assert [line for line in log if line.startswith(("begin", "connect", "history"))] == [
        *("begin 1", "connect"),
        *("begin 2", "connect", "history connects"),
    ]


def test_engines_that_are_lost_in_every_join_end_the_run_after_the_allowed_restarts() -> None:
    log: list[str] = []
    some = restarter(log)
    some.lost.limit.max_restarts = 3
    failing(some, log, ENGINE, times=99)
    with pytest.raises(EnginesLostError, match=r"`engine\.max_restarts` = 3 allows fewer"):
        some.restart_lost()
    assert log.count("connect") == 3


def test_only_deaths_within_the_last_finished_steps_count_against_the_limit() -> None:
    """Every engine, or another one, dies after so many finished steps."""
    some, finished = restarter([]), [0]
    some.lost.limit = RestartLimit(max_restarts=3, newest_step=lambda: finished[0])

    def die(number: int, at_step: int) -> None:
        finished[0] = at_step
        some.lost.engines.lost = (number,)
        some.restart_lost()

    for number, at_step in ((0, 5), (1, 40), (2, 40), (0, 5 + WINDOW_STEPS), (1, 40 + WINDOW_STEPS), (1, 150)):
        die(number, at_step)
    assert some.num_restarts == 6, "the metric counts the whole run"
    with pytest.raises(EnginesLostError, match=r"have died 4 times within 100 finished steps, .* = 3 allows fewer"):
        die(2, 4 + 2 * WINDOW_STEPS)


def test_a_join_that_fails_by_the_trainer_or_without_a_lost_engine_is_not_repeated() -> None:
    log: list[str] = []
    trainer = restarter(log)
    failing(trainer, log, ProcessLostError("trainer.attach_group failed", Place(role="trainer", ranks=(0,))), times=9)
    with pytest.raises(ProcessLostError, match="attach_group"):
        trainer.restart_lost()
    assert (log.count("connect"), trainer.num_restarts) == (1, 1)
    log.clear()
    nobody = restarter(log)
    failing(nobody, log, ENGINE, times=9)
    nobody.lost.engines.end_silent = lambda *, timeout_s: None
    with pytest.raises(ProcessLostError, match="init_transport"):
        nobody.restart_lost()
    assert (log.count("connect"), nobody.num_restarts) == (1, 1)
