"""Whole saves of a trainer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer


def save(trainer: "Trainer", path: str) -> None:
    """Save from copies and wait."""
    trainer.begin_save(path, background=True)
    trainer.finish_save()
