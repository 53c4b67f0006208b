import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from wandb.errors import AuthenticationError, UsageError
from wandb.proto import wandb_internal_pb2

from launcher.config.schema import WandbConfig
from launcher.errors import ConfigError
from launcher.run_dir import wandb as tracking
from launcher.run_dir.wandb import Tracker
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


def logged_steps(run_dir: Path, folders: str = "offline-run-*") -> list[tuple[str, int]]:
    """(run id, step) of every history record in every wandb file of these folders, in order of writing."""
    found = []
    for path in sorted((run_dir / "wandb").glob(f"{folders}/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for text in log_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            if record.WhichOneof("record_type") == "history":
                found.append((path.stem.removeprefix("run-"), record.history.step.num))
    return found


def test_an_offline_run_resumed_keeps_its_id_and_logs_no_step_twice(tmp_path: Path) -> None:
    sample = {"prompt": "1 + 1", "response": "2", "reward": 1.0, "ground_truth": "2", "length": 1, "versions": [0]}
    first = Tracker.start(WandbConfig(), tmp_path, {"seed": 0})
    for step in range(3):
        assert first.log_step(step, {"reward/mean": step / 10}, [sample])
    first.finish()
    resumed = Tracker.start(WandbConfig(), tmp_path, {"seed": 0})
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


def test_a_run_whose_server_cannot_be_reached_goes_on_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    said: list[str] = []
    tracker = Tracker.start(WandbConfig(mode="online"), tmp_path, {}, say=said.append)
    assert len(said) == 1 and "wandb cannot be reached" in said[0] and "wandb sync" in said[0]
    assert tracker.log_step(0, {"reward/mean": 1.0})
    tracker.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*"))


LOSES_ITS_SERVER = """
import sys, time
from pathlib import Path
from launcher.config.schema import WandbConfig
from launcher.run_dir import wandb as tracking

tracking.FINISH_TIMEOUT_S = 2.0
run_dir, row = Path(sys.argv[1]), {"prompt": "1 + 1", "response": "2"}
tracker = tracking.Tracker.start(WandbConfig(mode="online"), run_dir, {}, say=lambda line: print("SAID", line))
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
        self.table_s = self.now_s = 0.0
        self.steps: list[tuple[int, bool]] = []
        """(step, whether it had a table)."""

    def log(self, data: Mapping[str, object], step: int) -> None:
        if self.error is not None:
            raise self.error
        self.now_s += self.table_s * ("samples" in data)
        self.steps.append((step, "samples" in data))

    def finish(self) -> None:
        if self.error is not None:
            raise self.error


def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: FakeRun) -> tuple[Tracker, list[str]]:
    said: list[str] = []
    monkeypatch.setattr(tracking, "_begin", lambda *_: run)
    monkeypatch.setattr(tracking, "time", SimpleNamespace(monotonic=lambda: 1e5 + run.now_s))
    return Tracker.start(WandbConfig(), tmp_path, {}, say=said.append), said


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
    tracker.finish()
    slow, left_out = said
    assert slow.startswith("wandb does not answer (for 11 s)") and "for 2 step(s)" in left_out


def test_the_evaluation_after_the_last_step_is_logged_once_and_does_not_count_as_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    tracker, _ = tracked(tmp_path, monkeypatch, run)
    assert tracker.log_step(0, {}) and tracker.log_evaluation(1, {"eval/a": 0.5})
    resumed, _ = tracked(tmp_path, monkeypatch, run)
    assert not resumed.log_evaluation(1, {"eval/a": 0.5})
    assert [resumed.log_step(step, {}) for step in (0, 1)] == [False, True]
    assert not resumed.log_evaluation(1, {"eval/a": 0.5})
    assert [step for step, _ in run.steps] == [0, 1, 1]


@pytest.mark.parametrize("refusal", [UsageError("No API key configured."), AuthenticationError("the key is wrong")])
def test_an_online_run_without_a_good_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise refusal

    monkeypatch.setattr(tracking, "_begin", refuse)
    with pytest.raises(ConfigError, match=rf"`wandb\.mode` = online: {refusal}.*wandb login"):
        Tracker.start(WandbConfig(mode="online"), tmp_path / "run", {})


def test_disabled_tracking_writes_nothing(tmp_path: Path) -> None:
    tracker = Tracker.start(WandbConfig(mode="disabled"), tmp_path, {})
    assert not tracker.log_step(0, {"reward/mean": 1.0})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []
