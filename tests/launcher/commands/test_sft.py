"""A warm start replaces an earlier one by a whole new one, and nothing else."""

from pathlib import Path
from typing import cast

import pytest

from launcher.checks.paths import WARM_START_MARKER
from launcher.commands import sft
from launcher.config.schema import SftConfig
from megatron_rl.trainer.group import TrainerGroup


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
    config = SftConfig.model_validate(
        {"model": "base", "output_dir": str(target), "data": {"path": "rows.jsonl"}, "num_steps": 3}
    )
    write(config, Exporting("first"))
    with pytest.raises(OSError, match="no space"):
        write(config, Exporting("second", fails=True))
    assert (target / "model.safetensors").read_text() == "first" and (target / WARM_START_MARKER).exists()
    write(config, Exporting("third"))
    assert (target / "model.safetensors").read_text() == "third"
    assert (target / WARM_START_MARKER).read_text() == '{"model": "base", "num_steps": 3}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["warm"]
