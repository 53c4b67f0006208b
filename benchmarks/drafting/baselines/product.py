"""The product's own drafter as a method of the replay: segments in shared memory, drafts at a threshold or a price."""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drafting.baselines.replay import Longs
from history.drafting.drafter import Drafter
from history.drafting.forward_cost import ForwardCostModel
from history.drafting.stats import DraftStats
from history.index.segment import build_segment, write_segment
from history.store.traces import Trace
from history.types import PastResponse, TokenIds, prompt_key


class Product:
    """A `Drafter`, together with the building and writing of segments that a node's reader does."""

    def __init__(
        self,
        segments_dir: Path,
        *,
        max_draft_tokens: int,
        threshold: float = 0.1,
        cost_model: ForwardCostModel | None = None,
        num_threads: int = 1,
    ) -> None:
        self._segments_dir = segments_dir
        self._drafter = Drafter(
            max_draft_tokens=max_draft_tokens,
            segments_dir=str(segments_dir),
            cost_model=cost_model,  # type: ignore[arg-type]
            threshold=threshold,
            num_threads=num_threads,
        )
        self._num_versions = 0
        self.num_tokens_built = 0
        self.build_s = 0.0
        """CPU time of this thread for building segments."""
        self.write_s = 0.0
        """CPU time of this thread for writing segments."""
        self.survivals: Sequence[Sequence[float]] = ()

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None:
        """Publish the prompt's next segment."""
        responses = [
            PastResponse(token_ids=trace.response_ids, step=trace.step, sample=trace.sample, reward=trace.reward)
            for trace in visit
        ]
        self._num_versions += 1
        began = time.thread_time()
        segment = build_segment(prompt_key(prompt_id), self._num_versions, responses)
        built = time.thread_time()
        write_segment(self._segments_dir, segment)
        self.build_s += built - began
        self.write_s += time.thread_time() - built
        self.num_tokens_built += sum(len(trace.response_ids) for trace in visit)

    def open(self, trace: Trace, max_length: int) -> int:
        """As in vLLM's proposer."""
        key = prompt_key(trace.prompt_id)
        length = len(trace.prompt_ids)
        return self._drafter.open(prompt_key=key, prompt_length=length, max_length=max_length, step=trace.step)

    def close(self, draft_row: int) -> None:
        """As in vLLM's proposer."""
        self._drafter.close(draft_row)

    def propose(self, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """The drafter's drafts."""
        return self._drafter.propose(draft_rows, token_ids, num_tokens, rooms)

    def drain(self) -> DraftStats:
        """Statistics of the drafter since the last call."""
        return self._drafter.drain()

    def num_bytes(self) -> int:
        """Size of the segment files."""
        return sum(path.stat().st_size for path in self._segments_dir.glob("*.segment"))
