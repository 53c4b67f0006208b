"""A warm start reads its rows within a deadline, tells skipped updates, and replaces an earlier one as a whole."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import ray
from rich.console import Console

from launcher.checks.paths import WARM_START_MARKER
from launcher.cluster.processes import Processes
from launcher.commands import sft
from launcher.config.schema import SftConfig
from launcher.errors import LaunchError
from launcher.run_dir.console import RunProgress
from megatron_rl.batching.sft_batch import SftBatch
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import StepResult
from rollout.data.sft_rows import load_sft_rows
from rollout.failures import DeadlineError

BATCH = SftBatch(micro_batches=(((0,),),), num_tokens=10)


def config_of(**settings: object) -> SftConfig:
    return SftConfig.model_validate(
        {"model": "base", "output_dir": "warm", "data": {"path": "rows.jsonl"}, "num_steps": 3} | settings
    )


def lines_of(skips: Sequence[bool], **settings: object) -> list[str]:
    """Lines of a warm start whose updates are skipped or made so."""
    results = (
        StepResult(
            metrics={"sft/loss": 1.5, "actor/lr": 1e-4} | ({} if skipped else {"actor/grad_norm": 2.0}),
            num_optimizer_steps=int(not skipped),
            num_skipped_updates=int(skipped),
        )
        for skipped in skips
    )
    trainer = cast(TrainerGroup, SimpleNamespace(sft_step=lambda batch: next(results)))
    printed = StringIO()
    progress = RunProgress(len(skips), Console(file=printed, width=160))
    log = sft._Log(config_of(num_steps=len(skips), **settings), progress)
    sft.learn(trainer, [BATCH] * len(skips), log)
    return printed.getvalue().splitlines()


def test_a_line_tells_the_updates_that_were_skipped_since_the_start() -> None:
    lines = lines_of([False, False, True, False, True, True, False], log_every=2)
    told = [line.partition(" s  ! ")[2] for line in lines]
    assert told == ["", "skipped 1 update", "skipped 3 updates", "skipped 3 updates"]


def test_a_warm_start_without_any_update_is_refused() -> None:
    assert lines_of([True, True, False])[-1].endswith("! skipped 2 updates")
    with pytest.raises(LaunchError, match=r"every update was skipped, because .* `output_dir` is as before"):
        lines_of([True, True, True])


@pytest.mark.parametrize(("num_bytes", "limit_s"), [(1, 7), (3_000_000, 37)])
def test_the_rows_are_read_by_a_task_of_the_command_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_bytes: int, limit_s: int
) -> None:
    """A file of many rows has more time."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_bytes(b" " * num_bytes)
    asked: list[object] = []

    def start_task(*arguments: object, **options: object) -> str:
        asked.append((arguments[0], arguments[1], options))
        return "reference"

    def late(ref: object, *, timeout: float) -> None:
        asked.append(timeout)
        raise ray.exceptions.GetTimeoutError(f"{ref} is not there after {timeout} s")

    monkeypatch.setattr(ray, "get", late)
    monkeypatch.setattr(sft, "load_kernels", lambda: None)
    running = cast(Processes, SimpleNamespace(start_task=start_task, nodes=[SimpleNamespace(name="gpu-00")]))
    expected = (
        rf"waited {limit_s} s \(`trainer.timeout_s`, and a second for each 100000 bytes\) for the reader of rows, node "
        r"gpu-00 to tokenise rows.jsonl; raise it"
    )
    with pytest.raises(DeadlineError, match=expected):
        sft._load_rows(config_of(trainer={"timeout_s": 7}), running)
    assert asked == [(load_sft_rows, "rows.jsonl", {"max_tokens": 1024}), pytest.approx(limit_s, abs=0.001)]


class Exporting:
    """A trainer that writes one file, or fails behind it."""

    def __init__(self, text: str, *, fails: bool = False) -> None:
        self._text = text
        self._fails = fails

    def export(self, path: str) -> None:
        Path(path).mkdir()  # as the trainer: it refuses an existing directory
        (Path(path) / "model.safetensors").write_text(self._text)
        if self._fails:
            raise OSError("no space left on device")


def write(config: SftConfig, trainer: Exporting) -> None:
    sft.write_output(config, cast(TrainerGroup, trainer))


def test_an_earlier_output_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "warm"
    config = config_of(output_dir=str(target))
    write(config, Exporting("first"))
    with pytest.raises(OSError, match="no space"):
        write(config, Exporting("second", fails=True))
    assert (target / "model.safetensors").read_text() == "first" and (target / WARM_START_MARKER).exists()
    write(config, Exporting("third"))
    assert (target / "model.safetensors").read_text() == "third"
    assert (target / WARM_START_MARKER).read_text() == '{"model": "base", "num_steps": 3}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["warm"]
