"""What the whole suite shares: one Ray, on it a trainer of two ranks and two engines, and what scripts answered."""

import gc
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from launcher.cluster.processes import Processes, processes
from launcher.config.schema import ClusterConfig
from tests.support.markers import is_left_out, mark_long, mark_slow
from tests.support.runs.background import Background, run_script
from tests.support.runs.drafting_runs import run_whose_history_is_killed
from tests.support.runs.ending_runs import run_to_other_ends
from tests.support.runs.whole_runs import (
    make_example,
    run_ahead,
    run_exported_and_evaluated,
    run_fed_with_changes,
    run_killed_once,
    run_to_its_end,
    run_warm_start,
    run_whose_trainer_is_lost,
)

settings.register_profile("no deadline", deadline=None)  # how long an example takes says something about the machine
settings.load_profile("no deadline")

JOBS = pytest.StashKey[Background]()

NUM_ACTORS = 32
"""More than any test has at a time; Ray counts actors, not cores."""

RUNS: dict[str, Callable[[Path], object]] = {
    "uninterrupted": run_to_its_end,
    "interrupted": run_killed_once,
    "trainer_lost": run_whose_trainer_is_lost,
    "fed_with_changes": run_fed_with_changes,
    "evaluated": run_exported_and_evaluated,
    "warm_start": run_warm_start,
}
"""Fixtures that wait for a whole run, in the order in which they run; most use what the first one left."""

OTHER_RUNS: dict[str, Callable[[Path], object]] = {
    "killed": run_whose_history_is_killed,
    "ahead": run_ahead,
    "ended": run_to_other_ends,
}
"""The same for runs that need the example alone; they run beside the others, after the scripts. Both rows take about as
long."""


@pytest.fixture(scope="session")
def running() -> Iterator[Processes]:
    """Ray, and what was started on it through the launcher's own code."""
    with processes(ClusterConfig(object_store_bytes=128 << 20), num_actors=NUM_ACTORS, log_dir=None) as started:
        yield started


@pytest.fixture(scope="module")
def ring(running, tmp_path_factory):
    """The trainer's weights are those of the directory until a test trains; nothing is published yet."""
    from tests.support.engines.tiny_vllm_models import make_weights, save_checkpoint
    from tests.support.runs.ring import Ring

    directory = tmp_path_factory.mktemp("ring") / "model"
    save_checkpoint(directory, "qwen3", make_weights("qwen3", 1), "bf16")
    started = Ring.start(running, str(directory))
    yield started
    running.end(started.engines.actors)
    running.end_trainer(started.trainer)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    from tests.support.engines.engine_answers import save_checkpoints

    return save_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session", autouse=True)
def background(request, tmp_path_factory) -> Iterator[Background]:
    """Whatever takes minutes begins at once, if a test that was chosen will ask for it."""
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    scripts: dict[str, Callable[[], object]] = {}
    if "oracle" in asked:
        from tests.support.engines.engine_answers import oracle_files

        files = oracle_files(request.getfixturevalue("checkpoints"), tmp_path_factory.mktemp("oracle"))
        scripts["oracle"] = partial(run_script, "tests.support.engines.oracle", files)
    if "answers" in asked:
        from tests.support.engines.peaked_model import save_peaked

        peaked = save_peaked(tmp_path_factory.mktemp("lossless"))
        scripts["lossless"] = partial(run_script, "tests.support.engines.drafting_jobs", peaked)
    if "parallel_formats" in asked:
        target = tmp_path_factory.mktemp("parallel") / "answers.json"
        arguments = str(request.getfixturevalue("checkpoints").root), str(target)
        scripts["parallel_formats"] = partial(run_script, "tests.support.engines.parallel_formats", arguments)
    runs: dict[str, Callable[[], object]] = {}
    if asked & {"example", *RUNS, *OTHER_RUNS}:
        example = tmp_path_factory.mktemp("example")

        made = threading.Event()

        def make() -> Path:
            try:
                return make_example(example)
            finally:
                made.set()

        def after_the_example(run: Callable[[Path], object]) -> object:
            made.wait()
            return run(example)

        runs["example"] = make
        runs |= {name: partial(run, example) for name, run in RUNS.items() if name in asked}
        scripts |= {name: partial(after_the_example, run) for name, run in OTHER_RUNS.items() if name in asked}
    running = request.config.stash[JOBS] = Background(scripts, runs)
    yield running
    running.end()


@pytest.fixture(scope="session")
def oracle(background):
    """What vLLM computes by its own loader, and after pushes: `tests.support.engines.oracle`."""
    from tests.support.engines.engine_answers import read_oracle

    return read_oracle(background.wait("oracle")[1])


@pytest.fixture(scope="session")
def parallel_formats(background) -> dict:
    """What `tests.support.engines.parallel_formats` has written."""
    return json.loads(Path(background.wait("parallel_formats")[1]).read_text())


@pytest.fixture(scope="session")
def example(background) -> Path:
    """Data and an untrained model of the arithmetic example."""
    return background.wait("example")


def _waits_for(name: str) -> Callable[..., object]:
    @pytest.fixture(scope="session", name=name)
    def fixture(background: Background) -> object:
        return background.wait(name)

    return fixture


globals().update({name: _waits_for(name) for name in (*RUNS, *OTHER_RUNS)})


def pytest_configure() -> None:
    """No garbage collection while tests are collected, for what is imported then stays alive."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Later collections do not scan the imported modules."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of slow tests only are not imported if slow tests are not asked for."""
    return True if is_left_out(collection_path, config.option.markexpr) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for a job come last: the jobs go on beside all other tests until then.

    Before them come the tests that start the session's Ray, which stays and costs time.
    """
    mark_slow(items)
    mark_long(items)
    awaited = {"answers", "parallel_formats", *RUNS, *OTHER_RUNS}

    def place(item: pytest.Item) -> tuple[bool, bool]:
        waits = bool(awaited.intersection(getattr(item, "fixturenames", ())))
        return waits, "end_to_end" in item.path.parts

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Beside the slowest tests (`--durations`): seconds of the jobs in the background, which no test contains."""
    jobs = config.stash.get(JOBS, None)
    if jobs is not None and config.getoption("durations"):
        shown = [f"{name} {seconds:.0f} s" for name, seconds in jobs.seconds().items()]
        terminalreporter.write_line(f"jobs in the background: {', '.join(shown) or 'none'}")
