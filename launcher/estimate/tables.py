"""A table of memory: the uses of one device or node in each phase of a step, and what it has. Pure."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_rl.memory import MemoryItem

_NAME, _COLUMN = 24, 8
"""Widths of the columns; nine phases fit into 96 characters."""


Kind = Literal["device", "host", "/dev/shm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Memory of one device, or of the host of one node."""

    kind: Kind
    load: str
    """What shares the memory, for people."""
    count: int
    """Number of devices or nodes that are like this one."""
    phases: Mapping[str, tuple[MemoryItem, ...]]
    """Items in each phase, in the order of a step."""
    available_bytes: int
    reclaimable: tuple[str, ...] = ()
    """Items that the system drops when memory is short; they do not count."""

    @property
    def title(self) -> str:
        """What it is a table of."""
        return f"{self.kind} with {self.load}" if self.kind == "device" else f"{self.kind} of a node: {self.load}"

    def total_bytes(self, phase: str) -> int:
        """Bytes needed in a phase."""
        return sum(item.num_bytes for item in self.phases[phase] if item.what not in self.reclaimable)

    @property
    def worst_phase(self) -> str:
        """The first phase of those that need most."""
        return max(self.phases, key=self.total_bytes)

    @property
    def needed_bytes(self) -> int:
        """Bytes needed in the worst phase."""
        return self.total_bytes(self.worst_phase)

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return self.needed_bytes <= self.available_bytes

    @property
    def available_text(self) -> str:
        """The available bytes; a job's nodes are unknown before it starts."""
        return "unknown" if self.available_bytes == sys.maxsize else gib(self.available_bytes)

    def lines(self) -> list[str]:
        """The table as text in GiB, at most 100 characters wide."""
        first, *others = self.phases.items()
        columns = dict(self.phases) if any(items != first[1] for _, items in others) else {"all": first[1]}
        rows: dict[str, dict[str, int]] = {}
        for phase, items in columns.items():
            for item in items:
                rows.setdefault(item.what, {})[phase] = item.num_bytes
        body = [
            _row(f"{what} *" if what in self.reclaimable else what, [by_phase.get(phase, 0) for phase in columns])
            for what, by_phase in rows.items()
        ]
        heading = f"{'GiB':{_NAME}}" + "".join(f"{phase:>{_COLUMN}}" for phase in columns)
        totals = [self.total_bytes(first[0])] if len(columns) == 1 else [self.total_bytes(phase) for phase in columns]
        sums = _row("sum", totals)
        verdict = "fits" if self.fits else "DOES NOT FIT"
        return [
            f"{self.title} (x {self.count})",
            heading,
            *body,
            sums,
            f"available: {self.available_text}; most in `{self.worst_phase}`: {verdict}",
            *(["* reclaimable, not in the sum"] if self.reclaimable else []),
        ]


def gib(num_bytes: int) -> str:
    """`num_bytes` as text in GiB."""
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _row(name: str, values: list[int]) -> str:
    return f"{name:{_NAME}}" + "".join(f"{_number(value) if value else '-':>{_COLUMN}}" for value in values)


def _number(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f}"
