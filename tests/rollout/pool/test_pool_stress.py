"""Every group is trained on exactly once; `python -m tests.support.pool_stress 1000000` runs for longer."""

import pytest

from tests.support.pool_stress import stress


@pytest.mark.parametrize("seed", [0, 1])
def test_every_group_is_trained_on_once_while_engines_die_and_restart(monkeypatch, seed):
    world = stress(20_000, seed, monkeypatch)
    assert world.num_deaths > 10
    assert world.num_kept > 10
    assert world.num_lost > 10
