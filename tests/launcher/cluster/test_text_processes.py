"""Processes with a tokenizer that do not load in time; over stand-ins for Ray."""

from types import SimpleNamespace

import pytest
import ray

from launcher.cluster import text_processes
from launcher.cluster.text_processes import start_text_processes
from rollout.config import RewardConfig
from rollout.data.tokenizer import TokenizerSource
from rollout.failures import DeadlineError, Place
from rollout.processes import ProcessId


class Actors:
    """Every actor answers a heartbeat; those of `hung` do not load."""

    def __init__(self, hung: tuple[int, ...]) -> None:
        self.hung = hung
        self.num_made = 0

    def options(self, **options: object) -> SimpleNamespace:
        del options
        return SimpleNamespace(remote=self.make)

    def make(self, *args: object) -> SimpleNamespace:
        del args
        number, self.num_made = self.num_made, self.num_made + 1
        return SimpleNamespace(
            alive=SimpleNamespace(remote=lambda: f"alive {number}"),
            start=SimpleNamespace(remote=lambda: f"start {number}"),
        )

    def wait(
        self, refs: list[str], *, timeout: float, num_returns: int = 1, fetch_local: bool = True
    ) -> tuple[list[str], list[str]]:
        del timeout, num_returns, fetch_local
        late = [ref for ref in refs if ref in [f"start {number}" for number in self.hung]]
        return [ref for ref in refs if ref not in late], late


@pytest.mark.parametrize(
    ("hung", "place", "named"),
    [
        ((0, 2), Place(role="text actor", ranks=(0,), node="gpu-00"), "text actor 0, node gpu-00"),
        ((2,), Place(role="scorer", ranks=(1,), node="gpu-02"), "scorer 1, node gpu-02"),
    ],
)
def test_a_process_that_does_not_load_is_named_with_its_node(
    monkeypatch: pytest.MonkeyPatch, hung: tuple[int, ...], place: Place, named: str
) -> None:
    actors = Actors(hung)
    monkeypatch.setattr(text_processes, "TextActor", actors)
    monkeypatch.setattr(text_processes, "ScorerActor", actors)
    monkeypatch.setattr(ray, "wait", actors.wait)
    monkeypatch.setattr(
        ray, "get", lambda ref: ProcessId(node_id="", pid=1, start_ticks=0, host=f"gpu-0{ref.removeprefix('alive ')}")
    )
    with pytest.raises(DeadlineError, match=f"waited 600 s for {named} to load") as late:
        start_text_processes(
            TokenizerSource(directory="model"),
            RewardConfig(),
            environments=[{}] * 3,
            node_ids=[""] * 3,
            num_cpus=1,
            note=lambda actor: None,
        )
    assert late.value.place == place
