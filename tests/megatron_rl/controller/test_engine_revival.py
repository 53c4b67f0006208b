"""A run without an engine: engines start, devices make room, and the last version is published to them again."""

from types import SimpleNamespace

import pytest

from megatron_rl.controller.engine_revival import EngineRevival
from megatron_rl.controller.phases import PhaseClock


@pytest.mark.parametrize("shares", [True, False])
def test_engines_restart_then_devices_make_room_then_the_last_version_is_published(shares: bool) -> None:
    log: list[str] = []
    sharing = SimpleNamespace(asleep=False, to_trainer=lambda: None, to_publish=lambda: log.append("make room"))
    revival = EngineRevival(
        restarter=SimpleNamespace(restart_lost=lambda: log.append("restart")),
        publisher=SimpleNamespace(version=4, publish=lambda version: log.append(f"publish {version}")),
        clock=PhaseClock(lambda actor, activity, start_s, end_s: log.append(f"span of {actor}: {activity}")),
        sharing=sharing if shares else None,
    )
    revival()
    room = ["make room"] if shares else []
    assert log == ["restart", *room, "publish 4", "span of publisher: publish"]
