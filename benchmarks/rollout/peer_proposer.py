"""A peer's way to draft (`benchmarks.drafting.baselines`), put where our own drafter sits inside vLLM."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from benchmarks.drafting.baselines.replay import Drafts, Longs
from history.drafting.stats import DraftStats
from history.store.traces import Trace
from history.types import TokenIds
from rollout.worker.proposer import HistoryProposer


class Peer(Protocol):
    """What is used of a `benchmarks.drafting.baselines.replay.Method`."""

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None:
        """All responses of a prompt's last visit."""

    def open(self, trace: Trace, max_length: int) -> int:
        """A request begins: its slot."""

    def close(self, slot: int) -> None:
        """A request has ended."""

    def propose(self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> Drafts:
        """One draft per row."""


class PeerDrafter:
    """A peer behind the interface of `history.drafting.drafter.Drafter`; drafts nothing until it has one."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.traces: Mapping[int, Trace] = {}
        """Any trace of a prompt, by the prompt's key."""

    def open(self, *, prompt_key: int, prompt_length: int, max_length: int, step: int = 0) -> int:
        """A request appeared: the peer's number for it."""
        return 0 if self.peer is None else self.peer.open(self.traces[prompt_key], max_length)

    def close(self, slot: int) -> None:
        """The request is gone."""
        if self.peer is not None:
            self.peer.close(slot)

    def propose(self, slots: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Ask for the rows that have a slot; the others draft nothing."""
        drafts: list[list[int]] = [[] for _ in slots]
        rows = (slots >= 0).nonzero()[0]
        if self.peer is None or len(rows) == 0:
            return drafts
        found = self.peer.propose(slots[rows], token_ids[rows], num_tokens[rows], rooms[rows])
        for row, draft in zip(rows.tolist(), found, strict=True):
            drafts[row] = list(draft)
        return drafts

    def drain(self) -> DraftStats:
        """Peers report nothing."""
        return DraftStats()


class PeerProposer(HistoryProposer):
    """vLLM's `custom_class` proposer around a peer."""

    def make_drafter(self, cost_model: object) -> PeerDrafter:
        """A drafter whose peer comes later."""
        self.drafter = PeerDrafter()
        return self.drafter
