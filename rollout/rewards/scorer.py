"""Decodes the responses of finished groups and scores them with the user's reward function.

The reward function is foreign code. It runs in worker processes, which are killed and replaced when a call exceeds the
time limit, and which can crash without harm to others. The limit counts from the moment a worker begins the call.

A failed or timed-out call yields a status and a line in the log. Its response leaves the group, or has the configured
substitute score. The line shows the response the first time that each kind of failure happens. Faults of every sample
raise instead: a bad path, a wrong return type, a function that has failed for every response of several prompts.
"""

import importlib
import logging
import multiprocessing
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import BaseContext

from pebble import ProcessExpired, ProcessPool

from rollout.config import RewardConfig
from rollout.data.tokenizer import Tokenizer
from rollout.failures import RewardBrokenError, brief
from rollout.rewards.call import RewardOutcome, RewardRequest, begin_worker, call_reward, check_reward, load_reward
from rollout.types import GroupColumns, PromptGroup, PromptId, Score, ScoreStatus

_LOG = logging.getLogger(__name__)
_SHOWN_CHARACTERS = 500
_FEWEST_FAILURES = 16
_FEWEST_PROMPTS = 4
"""A function that has failed for this many responses to this many prompts, and never succeeded, is broken."""


class ResponseScorer:
    """One reward function and its pool of worker processes. All methods mutate."""

    def __init__(self, tokenizer: Tokenizer, config: RewardConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._workers: ProcessPool | None = None
        self._shown: set[ScoreStatus] = set()
        self._has_succeeded = False
        self._num_failed = 0
        self._failed_prompts: set[PromptId] = set()

    def start(self) -> None:
        """Import the reward function and start the workers; idempotent.

        Raises:
            ValueError: the reward function's path is bad, or it cannot work on this machine.
            RewardBrokenError: the function's module fails while it is imported.
        """
        if self._workers is None:
            _import_reward(self._config.function)
            check_reward(self._config.function, timeout_s=self._config.timeout_s)
            self._workers = self._new_workers()

    def _new_workers(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._config.num_workers,
            initializer=begin_worker,
            initargs=(self._config.function, self._config.memory_bytes, self._config.max_file_bytes),
            context=_worker_context(self._config.function),
        )

    def score(self, group: PromptGroup, columns: GroupColumns) -> tuple[Score, ...]:
        """Scores of a group's responses, [G], in order.

        Raises:
            RewardBrokenError: the reward function returned neither a number nor a dict with `score`, or it has failed
                for every response so far.
        """
        texts = [self._tokenizer.decode(columns.response(sample)) for sample in range(len(columns.offsets) - 1)]
        calls = [self._call(group, text) for text in texts]
        return tuple(self._score(group, text, call) for text, call in zip(texts, calls, strict=True))

    def close(self) -> None:
        """End the workers, and the calls that they run."""
        if self._workers is not None:
            _end(self._workers)
            self._workers = None

    def _call(self, group: PromptGroup, text: str) -> "_Call":
        assert self._workers is not None, "`start` comes before `score`"
        if not self._workers.active:
            self._replace(self._workers, "a worker died between two calls")
        request = self._request(group, text)
        outcome = self._workers.schedule(call_reward, args=(request,), timeout=self._config.timeout_s)
        return _Call(workers=self._workers, outcome=outcome)

    def _replace(self, workers: ProcessPool, reason: object) -> None:
        """Start new workers, because these have given up; nothing if that has happened before."""
        if workers is self._workers:
            _LOG.warning("the workers of %s gave up (%s) and are replaced", self._config.function, reason)
            self._workers = self._new_workers()
            _end(workers)

    def _request(self, group: PromptGroup, text: str) -> RewardRequest:
        return RewardRequest(
            function=self._config.function,
            data_source=group.prompt.data_source,
            solution_str=text,
            ground_truth=group.prompt.ground_truth,
            extra_info_json=group.prompt.extra_info_json,
        )

    def _score(self, group: PromptGroup, text: str, call: "_Call", *, is_repeated: bool = False) -> Score:
        try:
            outcome = call.outcome.result()
        except BrokenProcessPool as error:
            # pebble gives up all calls if a worker dies before the worker has said which call it runs
            self._replace(call.workers, error)
            if not is_repeated:
                return self._score(group, text, self._call(group, text), is_repeated=True)
            return self._failed(group, text, ScoreStatus.ERROR, f"its process died: {error}")
        except FutureTimeoutError:
            return self._failed(group, text, ScoreStatus.TIMEOUT, f"over the limit of {self._config.timeout_s} s")
        except ProcessExpired as error:
            return self._failed(group, text, ScoreStatus.ERROR, f"its process died: {error}")
        if outcome.misuse:
            raise RewardBrokenError(outcome.misuse)
        if outcome.error:
            return self._failed(group, text, ScoreStatus.ERROR, outcome.error)
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
        substitute = self._config.failure_score
        return Score(reward=substitute or 0.0, status=status, error=line, is_left_out=substitute is None)

    def _give_up_if_broken(self, prompt_id: PromptId, error: str) -> None:
        if self._has_succeeded:
            return
        self._num_failed += 1
        self._failed_prompts.add(prompt_id)
        if self._num_failed >= _FEWEST_FAILURES and len(self._failed_prompts) >= _FEWEST_PROMPTS:
            raise RewardBrokenError(
                f"reward.function: {self._config.function} has failed for each of the first {self._num_failed} "
                f"responses, to {len(self._failed_prompts)} prompts; the last time: {error}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call of the reward function, and the workers to which it was given."""

    workers: ProcessPool
    outcome: "Future[RewardOutcome]"


def _end(workers: ProcessPool) -> None:
    workers.stop()
    workers.join()


def _import_reward(function: str) -> None:
    """Import the reward function.

    Raises:
        ValueError: there is no such module or function.
        RewardBrokenError: the module exists and fails.
    """
    try:
        load_reward(function)
    except Exception as error:  # the border to the user's code, which may raise anything while it is imported
        reason = error.__cause__ if isinstance(error, ValueError) else error
        module = function.rpartition(".")[0]
        if reason is None or (isinstance(reason, ModuleNotFoundError) and f"{module}.".startswith(f"{reason.name}.")):
            raise
        raise RewardBrokenError(f"reward.function: {function}: importing its module failed: {brief(reason)}") from error


def _worker_context(function: str) -> BaseContext:
    """A fork server that has imported the reward function's module, so that a killed worker is replaced quickly.

    Plain fork would copy the threads of this process (tokenizers, ray) in an undefined state.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", importlib.import_module(function.rpartition(".")[0]).__name__])
    return context
