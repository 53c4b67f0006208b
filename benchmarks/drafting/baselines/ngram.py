"""vLLM's method `ngram` (Saxena's prompt lookup): drafts the tokens after an earlier occurrence of the last tokens.

The search is vLLM's function on the request's own text. Its defaults match exactly the last 5 tokens.
"""

from collections.abc import Callable, Sequence

from benchmarks.drafting.baselines.replay import Longs
from history.store.traces import Trace
from history.types import TokenIds


def vllm_search() -> Callable[..., TokenIds]:
    """The search function of vLLM, with the keyword arguments that `Ngram.propose` passes."""
    # imported late: it brings torch and the whole of vLLM
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    search: Callable[..., TokenIds] = _find_longest_matched_ngram_and_propose_tokens
    return search


class Ngram:
    """Searches prompt and output for the last `shortest` to `longest` tokens."""

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
        """Do nothing: the method has no history."""

    def open(self, trace: Trace, max_length: int) -> int:
        """Begin a request; nothing is prepared."""
        self._num_requests += 1
        return self._num_requests

    def close(self, draft_row: int) -> None:
        """End a request; nothing is stored."""

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
        """0: the method uses only the engine's text."""
        return 0
