"""Decodes the responses of finished groups and scores them with the user's reward function.

The reward function is foreign code. It runs in worker processes (`rollout.rewards.workers`), which are killed and
replaced when a call exceeds a limit, and which can crash without harm to others. Groups are scored side by side: their
calls share the workers, those of the first group first. A call that hangs costs its own worker until its time limit.

A failed or late call yields a status and a line in the log. Its response has the configured substitute score
(`reward.failure_score`). Without one, a late call has the score that the function's module declares (`LATE_SCORE`).
With neither, the response leaves the group. The line shows the response the first time that each kind of failure
happens. Faults of every sample raise instead: a bad path, a wrong return type, a function that has failed for every
response of several prompts.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from rollout.config import RewardConfig
from rollout.data.tokenizer import Tokenizer
from rollout.failures import RewardBrokenError
from rollout.rewards.call import RewardOutcome, RewardRequest
from rollout.rewards.workers import RewardWorkers
from rollout.types import GroupColumns, PromptGroup, PromptId, Score, ScoreStatus, WorkerEvents

_LOG = logging.getLogger(__name__)
_SHOWN_CHARACTERS = 500
_FEWEST_FAILURES = 16
_FEWEST_PROMPTS = 4
"""A function that has failed for this many responses to this many prompts, and never succeeded, is broken."""


class ResponseScorer:
    """One reward function and its workers, used in one event loop. All methods mutate."""

    def __init__(self, tokenizer: Tokenizer, config: RewardConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._workers: RewardWorkers | None = None
        self._decoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        """One thread, because the tokenizer is not made for several; it decodes groups in order."""
        self._shown: set[ScoreStatus] = set()
        self._has_succeeded = False
        self._num_failed = 0
        self._failed_prompts: set[PromptId] = set()
        self._verdict = ""
        """Why the function is broken; groups that are scored side by side all end with the same words."""

    async def start(self) -> None:
        """Import the reward function and start the workers; errors as for `RewardWorkers.start`."""
        workers = RewardWorkers(self._config)
        await workers.start()
        self._workers = workers

    async def score(self, group: PromptGroup, columns: GroupColumns) -> tuple[Score, ...]:
        """Scores of a group's responses, [G], in order.

        Raises:
            RewardBrokenError: the reward function returned neither a number nor a dict with `score`, or an `acc` that
                is no number, or it has failed for every response so far.
            ProcessLostError: the server of the workers died.
        """
        assert self._workers is not None, "`start` comes before `score`"
        texts = await asyncio.get_running_loop().run_in_executor(self._decoding, self._texts, columns)
        calls = [self._workers.submit(self._request(group, text)) for text in texts]
        outcomes = await asyncio.gather(*calls)
        return tuple(self._score(group, text, outcome) for text, outcome in zip(texts, outcomes, strict=True))

    def take_events(self) -> WorkerEvents:
        """See `RewardWorkers.take_events`."""
        assert self._workers is not None, "`start` comes before `take_events`"
        return self._workers.take_events()

    async def close(self) -> None:
        """End the workers, and the calls that they run."""
        self._decoding.shutdown(wait=False)
        if self._workers is not None:
            await self._workers.close()
            self._workers = None

    def _texts(self, columns: GroupColumns) -> list[str]:
        return [self._tokenizer.decode(columns.response(sample)) for sample in range(len(columns.offsets) - 1)]

    def _request(self, group: PromptGroup, text: str) -> RewardRequest:
        return RewardRequest(
            function=self._config.function,
            data_source=group.prompt.data_source,
            solution_str=text,
            ground_truth=group.prompt.ground_truth,
            extra_info_json=group.prompt.extra_info_json,
        )

    def _score(self, group: PromptGroup, text: str, outcome: RewardOutcome) -> Score:
        if outcome.misuse:
            raise RewardBrokenError(outcome.misuse)
        if outcome.error:
            status = ScoreStatus.TIMEOUT if outcome.is_late else ScoreStatus.ERROR
            return self._failed(group, text, status, outcome.error)
        self._has_succeeded = True
        return Score(reward=outcome.reward, status=ScoreStatus.OK, details=outcome.details)

    def _failed(self, group: PromptGroup, text: str, status: ScoreStatus, error: str) -> Score:
        line = " ".join(error.split())
        sample = ""
        if status not in self._shown:
            self._shown.add(status)
            sample = f"; ground truth {group.prompt.ground_truth!r}, response {text[:_SHOWN_CHARACTERS]!r}"
        _LOG.warning("scoring of a response to %s: %s: %s%s", group.prompt.prompt_id, status.value, line, sample)
        self._give_up_if_broken(group.prompt.prompt_id, line)
        substitute = self._substitute(status)
        return Score(reward=substitute or 0.0, status=status, error=line, is_left_out=substitute is None)

    def _substitute(self, status: ScoreStatus) -> float | None:
        """Reward of a call that has none; None if its response leaves the group."""
        if self._config.failure_score is not None or status is not ScoreStatus.TIMEOUT:
            return self._config.failure_score
        assert self._workers is not None, "`start` comes before `score`"
        return self._workers.late_score

    def _give_up_if_broken(self, prompt_id: PromptId, error: str) -> None:
        if self._verdict:
            raise RewardBrokenError(self._verdict)
        if self._has_succeeded:
            return
        self._num_failed += 1
        self._failed_prompts.add(prompt_id)
        if self._num_failed >= _FEWEST_FAILURES and len(self._failed_prompts) >= _FEWEST_PROMPTS:
            self._verdict = (
                f"reward.function: {self._config.function} has failed for each of the first {self._num_failed} "
                f"responses, to {len(self._failed_prompts)} prompts; the last time: {error}"
            )
            raise RewardBrokenError(self._verdict)
