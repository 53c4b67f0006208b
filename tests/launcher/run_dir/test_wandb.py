import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb.errors import AuthenticationError, UsageError
from wandb.proto import wandb_internal_pb2

from launcher.config.schema import WandbConfig
from launcher.errors import ConfigError
from launcher.run_dir import wandb as tracking
from launcher.run_dir.wandb import Tracker

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


def logged_steps(run_dir: Path) -> list[tuple[str, int]]:
    """(run id, step) of every history record in every offline wandb file below `run_dir`, in order of writing."""
    found = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
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
