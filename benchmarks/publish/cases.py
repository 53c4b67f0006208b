"""Cases of `benchmarks.publish`: trainers, engines, formats and transports, and the key of a row."""

from dataclasses import dataclass

from benchmarks.harness.record import Row
from megatron_rl.config import ParallelConfig
from rollout.config import Format
from rollout.weights.format import WeightFormat

BUCKET_BYTES = 16 << 20

TRAINERS = {"TP2": ParallelConfig(tensor=2), "PP2": ParallelConfig(pipeline=2)}
ENGINES = {"2 x TP1": (2, 1), "1 x TP2": (1, 2)}
"""(number of engines, ranks of each)."""
TRANSPORTS = ("shm", "gloo")
TITLES = {"trainer": "ray::TrainerActor", "engine": "VLLM::"}
"""Titles of the processes of each role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trainer, its engines and their format."""

    trainer: str
    engines: str
    format: Format

    @property
    def key(self) -> tuple[str, ...]:
        """The first part of the key of this case's rows."""
        return self.trainer, self.engines, self.format

    @property
    def weight_format(self) -> WeightFormat:
        """The format for all layers; BF16 layers would only dilute the measurement."""
        return WeightFormat(name=self.format)


def row_key(row: Row) -> tuple[str, ...]:
    """Trainer, engines, format and transport of a row."""
    return tuple(str(row[name]) for name in ("trainer", "engines", "format", "transport"))
