"""Drafts of given lengths and no sense, inside vLLM: what verifying costs, whatever is accepted."""

from collections.abc import Sequence

import numpy as np

from benchmarks.drafting.baselines.replay import Longs
from history.drafting.stats import DraftStats
from history.types import TokenIds
from rollout.worker.proposer import HistoryProposer


class ScriptedDrafter:
    """Behind the interface of `history.drafting.drafter.Drafter`."""

    def __init__(self) -> None:
        self.lengths: Sequence[int] = (0,)
        """Of the rows' next drafts, repeated as often as there are rows."""
        self._random = np.random.default_rng(0)

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int, step: int = 0) -> int:
        """Every request is alike."""
        return 0

    def close(self, slot: int) -> None:
        """Nothing is kept."""

    def propose(self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Draft random ids, which no model emits next but by chance; all models have that many."""
        return [
            self._random.integers(1, 1 << 14, min(self.lengths[row % len(self.lengths)], room)).tolist()
            if slot >= 0
            else []
            for row, (slot, room) in enumerate(zip(slots.tolist(), rooms.tolist(), strict=True))
        ]

    def drain(self) -> DraftStats:
        """Nothing is reported."""
        return DraftStats()


class ScriptedProposer(HistoryProposer):
    """vLLM's `custom_class` proposer of `benchmarks.rollout.step_time`."""

    def make_drafter(self, cost_model: object) -> ScriptedDrafter:
        """A drafter that drafts nothing until it is told to."""
        self.script = ScriptedDrafter()
        return self.script
