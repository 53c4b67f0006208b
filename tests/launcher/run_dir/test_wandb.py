import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Literal

import pytest
from pydantic import ValidationError
from wandb import Settings
from wandb.errors import AuthenticationError, UsageError
from wandb.proto import wandb_internal_pb2

from launcher.config.schema import WandbConfig
from launcher.errors import ConfigError
from launcher.estimate.disk import TABLE_COPIES
from launcher.run_dir import wandb as tracking
from launcher.run_dir.resume import flat_keys
from launcher.run_dir.wandb import Tracker
from tests.launcher.run_dir.test_resume import run_config
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT
from tests.support.wandb_server import KEY, wandb_server

BLOCK_BYTES, HEADER = 32768, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def log_records(path: Path) -> Iterator[bytes]:
    """Records of a LevelDB log after wandb's seven bytes: blocks of fragments, each (checksum, length, kind)."""
    content, at, parts = path.read_bytes(), 7, b""
    while at + HEADER.size <= len(content):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEADER.size:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, length, kind = HEADER.unpack_from(content, at)
        parts += content[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def records(run_dir: Path, folders: str = "offline-run-*") -> Iterator[tuple[str, wandb_internal_pb2.Record]]:
    """(run id, record) of every record in every wandb file of these folders, in order of writing."""
    for path in sorted((run_dir / "wandb").glob(f"{folders}/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for text in log_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            yield path.stem.removeprefix("run-"), record


def logged_steps(run_dir: Path, folders: str = "offline-run-*") -> list[tuple[str, int]]:
    """(run id, step) of every history record."""
    return [
        (run_id, record.history.step.num)
        for run_id, record in records(run_dir, folders)
        if record.WhichOneof("record_type") == "history"
    ]


def test_an_offline_run_resumed_keeps_its_id_and_logs_no_step_twice(tmp_path: Path) -> None:
    sample = {"prompt": "1 + 1", "response": "2", "reward": 1.0, "ground_truth": "2", "length": 1, "versions": [0]}
    first = Tracker.start(WandbConfig(), tmp_path, {"seed": 0}, first_step=0)
    for step in range(3):
        assert first.log_step(step, {"reward/mean": step / 10}, [sample])
    first.finish()
    resumed = Tracker.start(WandbConfig(), tmp_path, {"seed": 0}, first_step=1)
    assert resumed.run_id == first.run_id
    assert [resumed.log_step(step, {"reward/mean": 1.0}) for step in range(1, 5)] == [False, False, True, True]
    resumed.finish()
    expected = [(first.run_id, step) for step in range(5)]
    deadline = time.monotonic() + 20  # wandb's own process may still be writing
    while logged_steps(tmp_path) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    assert logged_steps(tmp_path) == expected
    tables = list((tmp_path / "wandb").glob("offline-run-*/files/media/table/samples*.json"))
    assert len(tables) == 3
    assert json.loads(tables[0].read_text())["columns"][:4] == ["step", "prompt", "response", "reward"]


def test_charts_of_evaluations_go_by_finished_steps_and_those_of_steps_do_not(tmp_path: Path) -> None:
    """The last evaluation stands in the row of the step before it."""
    tracker = Tracker.start(WandbConfig(), tmp_path, {"seed": 0}, first_step=0)
    assert tracker.log_step(0, {"reward/mean": 0.5, "eval/held/bf16/avg@1": 0.1})
    assert tracker.log_step(1, {"reward/mean": 0.6})
    assert tracker.log_evaluation(2, {"eval/held/bf16/avg@1": 0.2})
    tracker.finish()

    def rows() -> list[dict[str, float]]:
        found = [each.history.item for _, each in records(tmp_path) if each.WhichOneof("record_type") == "history"]
        return [{item.nested_key[0]: json.loads(item.value_json) for item in row} for row in found]

    deadline = time.monotonic() + 20  # wandb's own process may still be writing
    while len(rows()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    names = ("_step", "reward/mean", "eval/held/bf16/avg@1", "finished_steps")
    assert [tuple(row.get(name) for name in names) for row in rows()] == [(0, 0.5, 0.1, 0), (1, 0.6, 0.2, 2)]
    defined = [each.metric for _, each in records(tmp_path) if each.WhichOneof("record_type") == "metric"]
    assert {each.glob_name: each.step_metric for each in defined if each.step_metric} == {"eval/*": "finished_steps"}


def test_a_run_whose_server_cannot_be_reached_goes_on_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    said: list[str] = []
    tracker = Tracker.start(WandbConfig(mode="online"), tmp_path, {}, first_step=0, say=said.append)
    assert len(said) == 1 and "wandb cannot be reached" in said[0] and "wandb sync" in said[0]
    assert tracker.log_step(0, {"reward/mean": 1.0})
    tracker.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*"))


LOGS_TABLES = """
import sys
from pathlib import Path
from launcher.config.schema import WandbConfig
from launcher.run_dir import wandb as tracking

tracking.SLOW_S = 1e9  # on a slow machine, too
tracker = tracking.Tracker.start(WandbConfig(), Path(sys.argv[1]), {}, first_step=0)
for step in range(3):
    assert tracker.log_step(step, {"reward/mean": 1.0}, [{"prompt": "1 + 1", "response": f"{step} " * 50_000}])
tracker.finish()
"""


def test_wandb_writes_to_the_run_directory_only_and_holds_the_counted_copies_of_tables(tmp_path: Path) -> None:
    """Its files in the user's home would grow without bound; `wandb sync` needs the copies."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    for folder in (home, temporary, tmp_path / "run"):
        folder.mkdir()
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "XDG_"))}
    places = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOGS_TABLES, "run"]
    subprocess.run(command, env=inherited | places, cwd=tmp_path, check=True, timeout=DEADLINE_S)
    assert [path for path in home.rglob("*") if path.is_file()] == []
    sizes = [path.stat().st_size for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file()]
    assert len([size for size in sizes if size >= 100_000]) == 3 * TABLE_COPIES
    assert sum(sizes) == pytest.approx(3 * TABLE_COPIES * 100_000, rel=0.1)
    staged = list((tmp_path / "run" / "wandb" / "artifacts" / "staging").glob("tmp*"))
    assert len(staged) == 3 * (TABLE_COPIES - 1)


LOSES_ITS_SERVER = """
import sys, time
from pathlib import Path
from launcher.config.schema import WandbConfig
from launcher.run_dir import wandb as tracking

tracking.FINISH_TIMEOUT_S = 2.0
run_dir, row = Path(sys.argv[1]), {"prompt": "1 + 1", "response": "2"}
say = lambda line: print("SAID", line)
tracker = tracking.Tracker.start(WandbConfig(mode="online"), run_dir, {}, first_step=0, say=say)
tracker.log_step(0, {"reward/mean": 0.0})
print("READY", tracker.run_id, flush=True)
input()
began_s = time.monotonic()
for step in range(1, 5):
    assert tracker.log_step(step, {"reward/mean": 1.0}, [row])
tracker.finish()
print("TOOK", time.monotonic() - began_s)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["is frozen", "has gone"])
def test_a_run_whose_server_vanishes_goes_on_and_ends_and_keeps_its_steps_on_the_disk(
    tmp_path: Path, fault: str
) -> None:
    with wandb_server() as server:
        settings = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_HTTP_TIMEOUT": "2"}
        process = subprocess.Popen(
            [sys.executable, "-c", LOSES_ITS_SERVER, str(tmp_path)],
            env=os.environ | settings | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        run_id = next(line.split()[1] for line in process.stdout if line.startswith("READY"))
        if fault == "is frozen":
            server.is_frozen = True
        else:
            server.end.set()
        try:
            text, _ = process.communicate("\n", timeout=DEADLINE_S)  # the end of the process, too
        finally:
            process.kill()
    assert process.returncode == 0
    said = [line.removeprefix("SAID ") for line in text.splitlines() if line.startswith("SAID")]
    assert len(said) == 3, said
    assert said[0].startswith("wandb does not answer (") and "`samples/` has all of them" in said[0]
    assert said[1].startswith("wandb has no table of samples for 4 step(s)")
    assert said[2].startswith("wandb has not taken all data (TimeoutError") and f"/*run-*-{run_id}`" in said[2]
    (seconds,) = (float(line.split()[1]) for line in text.splitlines() if line.startswith("TOOK"))
    assert seconds < 120  # wandb alone would try for many minutes
    assert logged_steps(tmp_path, "run-*") == [(run_id, step) for step in range(5)]


class FakeRun:
    """A wandb run whose process has ended, or which is slow with tables, by a clock of its own."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.offline = False
        self.table_s = self.now_s = 0.0
        self.steps: list[tuple[int, bool]] = []
        """(step, whether it had a table)."""
        self.starting_step = 0
        self.committed: list[int] = []
        self.summary: dict[str, object] = {}

    def log(self, data: Mapping[str, object], step: int, commit: bool | None = None) -> None:
        if self.error is not None:
            raise self.error
        if commit:
            self.committed.append(step)
            return
        self.now_s += self.table_s * ("samples" in data)
        self.steps.append((step, "samples" in data))

    def finish(self) -> None:
        if self.error is not None:
            raise self.error


def tracked(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: FakeRun,
    *,
    first_step: int = 0,
    settings: Mapping[str, object] = MappingProxyType({"seed": 0}),
) -> tuple[Tracker, list[str]]:
    """A start of the run in `run_dir`, and what it says."""
    said: list[str] = []
    monkeypatch.setattr(tracking, "_begin", lambda *_: run)
    monkeypatch.setattr(tracking, "time", SimpleNamespace(monotonic=lambda: 1e5 + run.now_s))
    return Tracker.start(WandbConfig(), run_dir, settings, first_step=first_step, say=said.append), said


def test_a_run_goes_on_without_wandbs_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun()
    tracker, said = tracked(tmp_path, monkeypatch, run)
    run.error = ConnectionResetError("Connection lost")
    assert tracker.log_step(0, {"reward/mean": 1.0}, [{"prompt": "1"}])
    assert not tracker.log_step(1, {"reward/mean": 1.0})
    assert "wandb takes no more steps (ConnectionResetError: Connection lost)" in said[-1]
    tracker.finish()
    other, said = tracked(tmp_path / "other", monkeypatch, run)
    other.finish()
    assert said[0].startswith("wandb has not taken all data (ConnectionResetError: Connection lost)")


def test_tables_pause_while_the_server_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, row = FakeRun(), [{"prompt": "1"}]
    tracker, said = tracked(tmp_path, monkeypatch, run)
    run.table_s = tracking.SLOW_S + 1
    assert all(tracker.log_step(step, {}, row) for step in range(3))
    assert run.steps == [(0, True), (1, False), (2, False)]
    run.now_s += tracking.TABLES_AGAIN_S
    assert tracker.log_step(3, {}, row)
    run.now_s += tracking.TABLES_AGAIN_S
    run.table_s = tracking.SLOW_S - 1
    assert all(tracker.log_step(step, {}, row) for step in (4, 5))
    assert run.steps[3:] == [(3, True), (4, True), (5, True)]
    run.offline, run.table_s = True, tracking.SLOW_S + 1  # a slow disk
    assert all(tracker.log_step(step, {}, row) for step in (6, 7))
    assert run.steps[6:] == [(6, True), (7, True)]
    tracker.finish()
    slow, left_out = said
    assert slow.startswith("wandb does not answer (for 11 s)") and "for 2 step(s)" in left_out


def test_the_evaluation_after_the_last_step_joins_its_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun()
    tracker, said = tracked(tmp_path, monkeypatch, run)
    assert tracker.log_step(0, {}) and tracker.log_evaluation(1, {"eval/a": 0.5})
    resumed, said_then = tracked(tmp_path, monkeypatch, run, first_step=1)
    assert not resumed.log_evaluation(1, {"eval/a": 0.5})
    assert resumed.run_id == tracker.run_id
    assert [resumed.log_step(step, {}) for step in (0, 1)] == [False, True]
    assert not resumed.log_evaluation(1, {"eval/a": 0.5}), "it came with the step"
    assert [step for step, _ in run.steps] == [0, 0, 1]
    assert said == said_then == [] and run.summary == {}


def test_an_evaluation_that_cannot_join_the_last_row_goes_to_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    tracker, said = tracked(tmp_path / "each", monkeypatch, run)
    assert tracker.log_step(1, {"eval/a": 0.25}) and tracker.log_evaluation(2, {"eval/a": 0.5})
    assert run.steps == [(1, False)], "the row keeps the evaluation after one step"
    assert run.committed == [1] and run.summary == {"eval/a": 0.5, "finished_steps": 2}
    assert len(said) == 1 and "after 2 steps in the summary" in said[0]
    run = FakeRun()
    tracker, _ = tracked(tmp_path / "killed", monkeypatch, run)
    assert tracker.log_step(1, {})
    tracker, said = tracked(tmp_path / "killed", monkeypatch, run, first_step=2)
    assert tracker.log_evaluation(2, {"eval/a": 0.5}) and not tracker.log_evaluation(2, {"eval/a": 0.5})
    assert run.steps == [(1, False)] and run.committed == [], "this start has no row to close"
    assert run.summary == {"eval/a": 0.5, "finished_steps": 2}
    assert "row of the last step is of an earlier start" in said[0]


def test_steps_that_wandb_drops_are_named_and_not_reported_as_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    tracker, said = tracked(tmp_path, monkeypatch, run)
    assert tracker.log_step(0, {}) and said == []
    run.starting_step = 1
    resumed, said = tracked(tmp_path, monkeypatch, run, first_step=1)
    assert said == [], "the usual resume"
    run.starting_step = 3
    resumed, said = tracked(tmp_path, monkeypatch, run, first_step=1)
    assert len(said) == 1 and f"run {resumed.run_id} has rows up to step 2" in said[0]
    assert [resumed.log_step(step, {}) for step in (1, 2, 3)] == [False, False, True]
    assert run.steps == [(0, False), (3, False)]


GETS_MORE_STEPS = """
import sys
from pathlib import Path
from launcher.config.schema import WandbConfig
from launcher.run_dir.wandb import Tracker

for begin, end in ((0, 2), (2, 4)):
    tracker = Tracker.start(WandbConfig(mode="online"), Path(sys.argv[1]), {}, first_step=begin, say=sys.exit)
    for step in range(begin, end):
        assert tracker.log_step(step, {"reward/mean": step / 10})
    assert tracker.log_evaluation(end, {"eval/a": end / 100})
    tracker.finish()
"""


def test_an_online_run_that_gets_more_steps_misses_none(tmp_path: Path) -> None:
    """The process of wandb begins a resumed run after the last row that the server has."""
    with wandb_server() as server:
        settings = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", GETS_MORE_STEPS, str(tmp_path)]
        subprocess.run(command, env=os.environ | settings, check=True, timeout=DEADLINE_S)
    names = ("_step", "reward/mean", "eval/a", "finished_steps")
    assert [tuple(row.get(name) for name in names) for row in server.rows] == [
        (0, 0.0, None, None),
        (1, 0.1, 0.02, 2),
        (2, 0.2, None, None),
        (3, 0.3, 0.04, 4),
    ]


OTHER_RATE: Mapping[str, object] = {"trainer": {"optimizer": {"learning_rate": 1e-6}}}


def logged(tracker: Tracker, steps: range) -> list[bool]:
    return [tracker.log_step(step, {"reward/mean": 0.1}) for step in steps]


def test_a_run_that_starts_from_its_first_weights_again_is_another_one_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, data or reward function may be other ones, also under the same configuration."""
    first, said = tracked(tmp_path, monkeypatch, FakeRun())
    unlogged, said_then = tracked(tmp_path, monkeypatch, FakeRun(), settings={"seed": 1})
    assert unlogged.run_id == first.run_id and said == said_then == [], "no step is repeated"
    assert all(logged(unlogged, range(4)))
    again, said = tracked(tmp_path, monkeypatch, FakeRun(), settings={"seed": 1})
    assert again.run_id != first.run_id and all(logged(again, range(4)))
    assert said == [
        f"wandb: run {again.run_id} begins, and {first.run_id} is not continued: "
        "the run starts from its first weights again"
    ]


@pytest.mark.parametrize(
    ("first_step", "changed", "continues"),
    [
        (2, {}, True),
        (2, OTHER_RATE, False),
        (3, OTHER_RATE, False),
        (4, OTHER_RATE, True),
        (2, {"engine": {"format": "int8", "num_engines": 2}}, False),
        (2, {"engine": {"format": "bf16", "num_engines": 8}, "run_dir": "/other", "cluster": {"min_nodes": 2}}, True),
    ],
    ids=[
        *("as it was", "other rate", "other rate, last step", "other rate, no step repeated", "other format"),
        "other engines and place",
    ],
)
def test_steps_that_another_configuration_repeats_go_to_another_run_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_step: int, changed: Mapping[str, object], continues: bool
) -> None:
    engines: Mapping[str, object] = {"format": "bf16", "num_engines": 2}
    settings = {"trainer": {"optimizer": {"learning_rate": 1e-5}}, "run_dir": "run", "engine": engines}
    first, _ = tracked(tmp_path, monkeypatch, FakeRun(), settings=settings)
    assert all(logged(first, range(4)))
    dead, _ = tracked(tmp_path, monkeypatch, FakeRun(), first_step=4, settings=settings | changed)
    assert dead.run_id == first.run_id, "it dies before its first step, and leaves the rows as they are"
    second, said = tracked(tmp_path, monkeypatch, FakeRun(), first_step=first_step, settings=settings | changed)
    assert logged(second, range(first_step, 6)) == [not continues or step > 3 for step in range(first_step, 6)]
    assert (second.run_id == first.run_id) is continues and bool(said) is not continues
    if said:
        assert said[0].endswith(f"steps {first_step} to 3 are repeated, and what they learn is configured anew")
    third, said = tracked(tmp_path, monkeypatch, FakeRun(), first_step=5, settings=settings | changed)
    assert third.run_id == second.run_id and said == [], "the same configuration repeats a step of its own"


def test_the_keys_that_decide_what_a_step_learns_are_keys_of_a_run() -> None:
    keys = set(flat_keys(run_config().model_dump(mode="json")))
    for table in (*tracking.LEARNING_KEYS, *tracking.NOT_LEARNING_KEYS):
        assert any(tracking._is_below(key, [table]) for key in keys), table
    for table in tracking.NOT_LEARNING_KEYS:
        assert tracking._is_below(table, tracking.LEARNING_KEYS)


@pytest.mark.parametrize(
    ("changed", "learns_alike"),
    [
        ({"reward": {"num_workers": 3}}, True),
        ({"reward": {"timeout_s": 99.0}}, True),
        ({"reward": {"failure_score": 0.0}}, False),
        ({"trainer": {"optimizer": {"states_on_host": True, "distributed": True}}}, True),
        ({"algorithm": {"mismatch_sample_tokens": 64}}, True),
        ({"checkpoint": {"every": 7}}, True),
        ({"algorithm": {"num_mini_batches": 2}}, False),
        ({"planner": {"overlap": 1}, "placement": {"mode": "disaggregated"}}, False),
        ({"trainer": {"dtype": "fp32"}}, False),
    ],
)
def test_only_keys_that_decide_what_a_step_learns_change_the_digest(
    changed: dict[str, object], learns_alike: bool
) -> None:
    before, now = (tracking._digest(run_config(**parts).model_dump(mode="json")) for parts in ({}, changed))
    assert (before == now) is learns_alike


def test_a_copy_of_a_run_directory_is_another_run_in_wandb_but_a_moved_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = tracked(tmp_path / "run", monkeypatch, FakeRun())
    assert all(logged(first, range(4)))
    shutil.copytree(tmp_path / "run", tmp_path / "branch")
    branch, said = tracked(tmp_path / "branch", monkeypatch, FakeRun(), first_step=4)
    assert branch.run_id != first.run_id and all(logged(branch, range(4, 6)))
    assert said[0].endswith(f"is not continued: the run directory is a copy of {tmp_path / 'run'}")
    resumed, said = tracked(tmp_path / "branch", monkeypatch, FakeRun(), first_step=5)
    assert resumed.run_id == branch.run_id and said == []
    (tmp_path / "run").rename(tmp_path / "moved")
    moved, said = tracked(tmp_path / "moved", monkeypatch, FakeRun(), first_step=4)
    assert moved.run_id == first.run_id and said == []
    state = tmp_path / "moved" / "wandb" / "tracking.json"
    remounted = json.loads(state.read_text()) | {"path": str(tmp_path / "moved"), "inode": 0}
    state.write_text(json.dumps(remounted))
    resumed, said = tracked(tmp_path / "moved", monkeypatch, FakeRun(), first_step=4)
    assert resumed.run_id == first.run_id and said == []


def test_a_run_whose_record_is_of_an_older_version_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "tracking.json").write_text('{"run_id": "ab12", "last_step": 3, "last_evaluation": -1}\n')
    resumed, said = tracked(tmp_path, monkeypatch, FakeRun(), first_step=2)
    assert resumed.run_id == "ab12" and said == []
    assert logged(resumed, range(2, 6)) == [False, False, True, True]


@pytest.mark.parametrize("refusal", [UsageError("No API key configured."), AuthenticationError("the key is wrong")])
def test_an_online_run_without_a_good_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise refusal

    monkeypatch.setattr(tracking, "_begin", refuse)
    with pytest.raises(ConfigError, match=rf"`wandb\.mode` = online: {refusal}.*wandb login"):
        Tracker.start(WandbConfig(mode="online"), tmp_path / "run", {}, first_step=0)


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_setting_that_wandb_refuses_is_not_blamed_on_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Literal["offline", "online"]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    config = WandbConfig(mode=mode).model_copy(update={"project": "team/rl"})
    with pytest.raises(ConfigError, match=rf"`wandb\.mode` = {mode}: Invalid project name 'team/rl'") as refused:
        Tracker.start(config, tmp_path / "run", {}, first_step=0)
    assert "wandb login" not in str(refused.value) and "the key of `wandb`" in str(refused.value)


@pytest.mark.parametrize("project", ["a/b", "a\\b", "a#b", "a?b", "a%b", "a:b", "x" * 129, "x" * 128, "a b-c.d é"])
def test_a_project_is_accepted_as_wandb_itself_accepts_it(project: str) -> None:
    def is_refused(by: Callable[..., object]) -> bool:
        try:
            by(project=project)
        except (UsageError, ValidationError):
            return True
        return False

    assert is_refused(WandbConfig) == is_refused(Settings)


def test_disabled_tracking_writes_nothing(tmp_path: Path) -> None:
    tracker = Tracker.start(WandbConfig(mode="disabled"), tmp_path, {}, first_step=0)
    assert not tracker.log_step(0, {"reward/mean": 1.0})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_project_that_wandb_would_refuse_is_none_of_a_run_without_wandb() -> None:
    assert WandbConfig.model_validate({"mode": "disabled", "project": "team/rl"}).project == "team/rl"
