"""A peer's drafting method (`benchmarks.drafting.baselines`) inside vLLM, in place of the product's drafter."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from benchmarks.drafting.baselines.replay import Drafts, Longs
from history.drafting.stats import DraftStats
from history.store.traces import Trace
from history.types import TokenIds
from rollout.worker.proposer import HistoryProposer


class Peer(Protocol):
    """The used part of `benchmarks.drafting.baselines.replay.Method`."""

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None:
        """Add all responses of a prompt's last visit to the history."""

    def open(self, trace: Trace, max_length: int) -> int:
        """Begin a request and return its slot."""

    def close(self, slot: int) -> None:
        """End a request."""

    def propose(self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> Drafts:
        """One draft per row."""


class PeerDrafter:
    """A peer with the interface of `history.drafting.drafter.Drafter`; without a peer it drafts nothing."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.traces: Mapping[int, Trace] = {}
        """One trace of each prompt, by the prompt's key."""

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int, step: int, is_counted: bool) -> int:
        """Begin a request and return the peer's slot for it."""
        return 0 if self.peer is None else self.peer.open(self.traces[prompt_key], max_length)

    def close(self, slot: int) -> None:
        """End a request."""
        if self.peer is not None:
            self.peer.close(slot)

    def propose(self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Drafts for the rows that have a slot; other rows get no draft."""
        drafts: list[list[int]] = [[] for _ in slots]
        rows = (slots >= 0).nonzero()[0]
        if self.peer is None or len(rows) == 0:
            return drafts
        found = self.peer.propose(slots[rows], token_ids[rows], num_tokens[rows], rooms[rows])
        for row, draft in zip(rows.tolist(), found, strict=True):
            drafts[row] = list(draft)
        return drafts

    def drain(self, *, keeps_requests: bool) -> DraftStats:
        """Empty statistics, since peers have none."""
        return DraftStats()


class PeerProposer(HistoryProposer):
    """The `custom_class` proposer of vLLM around a peer."""

    def make_drafter(self, cost_model: object) -> PeerDrafter:
        """A drafter without a peer; `benchmarks.rollout.server` sets the peer after the start."""
        self.drafter = PeerDrafter()
        return self.drafter
