"""vLLM's `ngram`: what followed when the last tokens stood before in a request's own text (Saxena's prompt lookup).

The search is vLLM's own function; its defaults look for the last 5 tokens exactly.
"""

from collections.abc import Callable, Sequence

from benchmarks.drafting.baselines.replay import Longs
from history.store.traces import Trace
from history.types import TokenIds


def vllm_search() -> Callable[..., TokenIds]:
    """The search of vLLM, whose keyword arguments are those of `Ngram.propose`'s call."""
    # imported late: it brings torch and the whole of vLLM
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    search: Callable[..., TokenIds] = _find_longest_matched_ngram_and_propose_tokens
    return search


class Ngram:
    """Looks for between `shortest` and `longest` last tokens in the prompt and the output."""

    def __init__(
        self, search: Callable[..., TokenIds], *, max_draft_tokens: int, shortest: int = 5, longest: int = 5
    ) -> None:
        self._search = search
        self._max_draft_tokens = max_draft_tokens
        self._shortest = shortest
        self._longest = longest
        self._num_requests = 0
        self.survivals: Sequence[Sequence[float]] = ()

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None:
        """Remembers nothing."""

    def open(self, trace: Trace, max_length: int) -> int:
        """Nothing to prepare."""
        self._num_requests += 1
        return self._num_requests

    def close(self, draft_row: int) -> None:
        """Nothing to forget."""

    def propose(self, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Search in each row."""
        return [
            self._search(
                origin_tokens=token_ids[row, :end],
                min_ngram=self._shortest,
                max_ngram=self._longest,
                max_model_len=end + room,
                k=self._max_draft_tokens,
            ).tolist()
            for row, (end, room) in enumerate(zip(num_tokens.tolist(), rooms.tolist(), strict=True))
        ]

    def num_bytes(self) -> int:
        """Nothing but the text that the engine has anyway."""
        return 0
