"""What `benchmarks.publish` measures: trainers, engines, formats and transports, and how a row says which."""

from dataclasses import dataclass

from benchmarks.harness.record import Row
from megatron_rl.config import ParallelConfig
from rollout.config import Format
from rollout.weights.format import WeightFormat

BUCKET_BYTES = 16 << 20

TRAINERS = {"TP2": ParallelConfig(tensor=2), "PP2": ParallelConfig(pipeline=2)}
ENGINES = {"2 x TP1": (2, 1), "1 x TP2": (1, 2)}
"""Number of engines, ranks of each."""
TRANSPORTS = ("shm", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trainer and its engines."""

    trainer: str
    engines: str
    format: Format

    @property
    def key(self) -> tuple[str, ...]:
        """What a row of this case begins with."""
        return self.trainer, self.engines, self.format

    @property
    def weight_format(self) -> WeightFormat:
        """Without exceptions, which would only dilute what is measured."""
        return WeightFormat(name=self.format)


def row_key(row: Row) -> tuple[str, ...]:
    """Of which case and transport a row is."""
    return tuple(str(row[name]) for name in ("trainer", "engines", "format", "transport"))
