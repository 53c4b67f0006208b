"""What the whole suite shares: one Ray, on it a trainer of two ranks and two engines, and what scripts answered."""

from collections.abc import Iterator, Sequence

import pytest

from launcher.config import ClusterConfig
from launcher.processes import Processes, processes
from tests.scripts import Script, Scripts

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


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    from tests.rollout.engine_answers import save_checkpoints

    return save_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session", autouse=True)
def scripts(request, tmp_path_factory) -> Iterator[Scripts]:
    """Whatever takes minutes begins at once, if a test that was chosen will ask for it."""
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    chosen: dict[str, Script] = {}

    def oracle_arguments() -> Sequence[str]:
        from tests.rollout.engine_answers import oracle_files

        return oracle_files(request.getfixturevalue("checkpoints"), tmp_path_factory.mktemp("oracle"))

    def lossless_arguments() -> Sequence[str]:
        from tests.rollout.peaked_model import save_peaked

        return save_peaked(tmp_path_factory.mktemp("lossless"))

    if "oracle" in asked:
        chosen["oracle"] = Script("tests.rollout.oracle", oracle_arguments)
    if "answers" in asked:
        chosen["lossless"] = Script("tests.rollout.drafting_jobs", lossless_arguments)
    running = Scripts(chosen)
    yield running
    running.end()


@pytest.fixture(scope="session")
def oracle(scripts):
    """What vLLM computes by its own loader, and after pushes: `tests.rollout.oracle`."""
    from tests.rollout.engine_answers import read_oracle

    return read_oracle(scripts.wait("oracle")[1])
