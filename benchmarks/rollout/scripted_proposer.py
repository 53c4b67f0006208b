"""Random drafts of given lengths inside vLLM, to measure the time of verification."""

from collections.abc import Sequence

import numpy as np

from benchmarks.drafting.baselines.replay import Longs
from history.drafting.stats import DraftStats
from history.types import TokenIds
from rollout.worker.proposer import HistoryProposer


class ScriptedDrafter:
    """A drafter of random tokens with the interface of `history.drafting.drafter.Drafter`."""

    def __init__(self) -> None:
        self.lengths: Sequence[int] = (0,)
        """Lengths of the next drafts, repeated over the rows."""
        self._random = np.random.default_rng(0)

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int, step: int, is_counted: bool) -> int:
        """Begin a request; all requests get slot 0."""
        return 0

    def close(self, slot: int) -> None:
        """End a request; nothing is stored."""

    def propose(self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Draft random ids below 2^14, which are in all vocabularies and are correct only by chance."""
        return [
            self._random.integers(1, 1 << 14, min(self.lengths[row % len(self.lengths)], room)).tolist()
            if slot >= 0
            else []
            for row, (slot, room) in enumerate(zip(slots.tolist(), rooms.tolist(), strict=True))
        ]

    def drain(self, *, keeps_requests: bool) -> DraftStats:
        """Empty statistics."""
        return DraftStats()


class ScriptedProposer(HistoryProposer):
    """The `custom_class` proposer of `benchmarks.rollout.step_time`."""

    def make_drafter(self, cost_model: object) -> ScriptedDrafter:
        """A drafter that drafts nothing until its lengths are set."""
        self.script = ScriptedDrafter()
        return self.script
