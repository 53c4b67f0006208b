"""What the whole suite shares: one Ray, and on it one trainer of two ranks with two engines."""

from collections.abc import Iterator

import pytest

from launcher.config import ClusterConfig
from launcher.processes import Processes, processes

NUM_ACTORS = 32
"""More than any test has at a time; Ray counts actors, not cores."""


@pytest.fixture(scope="session")
def running() -> Iterator[Processes]:
    """Ray, and what was started on it through the launcher's own code."""
    with processes(ClusterConfig(object_store_bytes=128 << 20), num_actors=NUM_ACTORS, log_dir=None) as started:
        yield started


@pytest.fixture(scope="session")
def ring(running, tmp_path_factory):
    """The trainer's weights are those of the directory until a test trains; nothing is published yet."""
    from tests.ring import Ring
    from tests.rollout.tiny_models import make_weights, save_checkpoint

    directory = tmp_path_factory.mktemp("ring") / "model"
    save_checkpoint(directory, "qwen3", make_weights("qwen3", 1), "bf16")
    return Ring.start(running, str(directory))
