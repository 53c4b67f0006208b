"""The order in which lost engines are brought back beside a trainer, over stand-ins for processes and devices."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from launcher.recovery.engines import EngineRestarter, LostEngines
from rollout.config import EngineConfig

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
        max_restarts=9,
        say=lambda line: None,
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
        "new 1 follows the others",
        "replace 1 by new 1",
        "new 2 has started",
        "new 2 follows the others",
        "replace 2 by new 2",
        "trainer and engines connect",
        "history connects",
    ]


def test_without_shared_devices_or_drafts_a_restarted_engine_is_only_connected() -> None:
    log: list[str] = []
    assert restarter(log, shares=False, drafts=False).restart_lost() == 1
    assert log == [
        *("end ['actor 1']", "begin 1", "new 1 has started", "replace 1 by new 1"),
        "trainer and engines connect",
    ]


@pytest.mark.parametrize("asks", [False, True])
def test_an_engine_that_hangs_is_restarted_only_if_ranks_are_asked(asks: bool) -> None:
    log: list[str] = []
    assert restarter(log, lost=(), hung=(2,)).restart_lost(ask_ranks=asks) == asks
    assert ("begin 2" in log, bool(log)) == (asks, asks)
