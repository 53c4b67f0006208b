"""Runs whose disk becomes full or read-only. Mounting needs root, so these tests are among those of `make faults`."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deadline import DEADLINE_S
from tests.support.runs.whole_runs import configuration, finish, rows, start, wait_for

pytestmark = [pytest.mark.multinode, pytest.mark.faults]
DISK_BYTES = 300 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a file system of 300 MiB."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def small_run(example: Path) -> Path:
    return configuration(
        example,
        num_steps=4,
        model=str(example / "model"),
        trainer={"dtype": "fp32", "max_micro_batch_tokens": 512},
        wandb={"mode": "disabled"},
    )


def test_a_run_on_a_full_disk_ends_with_its_checkpoint_whole_and_resumes_once_there_is_room(
    example: Path, disk: Path
) -> None:
    run_dir, config = disk / "run", small_run(example)
    process = start(config, run_dir)
    wait_for(lambda: (run_dir / "checkpoints" / "latest").exists(), process)
    filling = disk / "filling"
    with filling.open("wb") as file:  # the disk of another user
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError:
            pass
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, output
    assert "the disk is full or cannot be written" in output and "No space left on device" in output
    assert "the trainer starts again" not in output, "a restart makes no room"
    filling.unlink()
    saved = int((run_dir / "checkpoints" / "latest").read_text())
    resumed = finish(start(config, run_dir))
    assert f"after step {saved}" in resumed
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == [0, 1, 2, 3]


def test_a_run_on_a_disk_that_becomes_read_only_ends_and_resumes_once_it_is_writable(example: Path, disk: Path) -> None:
    run_dir, config = disk / "run", small_run(example)
    process = start(config, run_dir)
    wait_for(lambda: (run_dir / "checkpoints" / "latest").exists(), process)
    subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)  # as ext4 does after a fault of the device
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, output
    assert "the disk is full or cannot be written" in output and "Read-only file system" in output
    subprocess.run(["umount", str(disk)], check=True)
    subprocess.run(["fsck.ext4", "-p", str(disk.parent / "image")], check=False, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(disk.parent / "image"), str(disk)], check=True)
    finish(start(config, run_dir))
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == [0, 1, 2, 3]
