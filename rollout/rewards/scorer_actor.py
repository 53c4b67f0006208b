"""A scorer: a Ray actor with a tokenizer and reward workers, which scores many groups at a time.

If its process dies, Ray restarts it under the same handle and repeats the calls that it had. So every call may be the
first of a process, and may come twice. Its methods run in one event loop and wait for workers without blocking it.
"""

import asyncio
import logging
import os

import ray

from rollout.config import RewardConfig
from rollout.data.tokenizer import Tokenizer, TokenizerSource
from rollout.failures import ProcessLostError
from rollout.group_parts import joined
from rollout.processes import ProcessId, no_collection, redirect_output, write_stacks_on_signal
from rollout.rewards.scorer import ResponseScorer
from rollout.types import GroupColumns, PromptGroup, ScorerAnswer

_log = logging.getLogger(__name__)


@ray.remote(max_concurrency=1 << 16)
class ScorerActor:
    """Passes groups to a `ResponseScorer`.

    Ray's default of 1,000 calls at a time would let `alive` wait behind the groups of a large step, so that a scorer
    that works counted as one that hangs.
    """

    def __init__(self, source: TokenizerSource, config: RewardConfig) -> None:
        """Only remembers its arguments; `start` does the work, so that its errors reach the caller unwrapped."""
        self._source = source
        self._config = config
        self._scorer: ResponseScorer | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Load the tokenizer and start the reward workers; idempotent.

        Raises:
            ValueError: there is no tokenizer, or the reward function's path is bad.
            RewardBrokenError: the module of the reward function fails while it is imported.
        """
        await self._started()

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def score(self, group: PromptGroup, *parts: GroupColumns) -> ScorerAnswer:
        """See `ResponseScorer.score`; `parts` are the group's tokens (`rollout.group_parts`)."""
        scorer = await self._started()
        try:
            scores = await scorer.score(group, joined(parts))
        except ProcessLostError:
            _log.exception("this scorer ends, so that Ray starts another one")
            os._exit(1)
        return ScorerAnswer(scores=scores, process=_this_process(), events=scorer.take_events())

    async def alive(self) -> ProcessId:
        """The process; the call of `rollout.pool.heartbeat`."""
        return _this_process()

    async def close(self) -> None:
        """See `ResponseScorer.close`."""
        if self._scorer is not None:
            await self._scorer.close()

    async def _started(self) -> ResponseScorer:
        async with self._starting:
            if self._scorer is None:
                redirect_output()
                write_stacks_on_signal()
                with no_collection():
                    tokenizer = await asyncio.to_thread(Tokenizer, self._source)
                scorer = ResponseScorer(tokenizer, self._config)
                await scorer.start()
                self._scorer = scorer
        return self._scorer


def _this_process() -> ProcessId:
    return ProcessId.of_this_process(str(ray.get_runtime_context().get_node_id()))
