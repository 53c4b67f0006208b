"""Decodes and scores finished groups, and loads prompts: everything that needs the tokenizer but no engine.

The controller must not import torch, and `transformers` does, so this lives in an actor of its own (`ScorerActor`).
Reward functions are other people's code: they run in worker processes, are killed and replaced when they run over the
time limit, and can crash without taking anything along. The limit counts from the moment a worker begins.

A failed or timed-out scoring gives the configured substitute, a status and a line in the log, with the sample the
first time each kind of failure happens. What is wrong for every sample (a bad path, a wrong return type, a tokenizer
that does not fit, a function that has failed for every response of several prompts) raises instead.
"""

import importlib
import logging
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.context import BaseContext
from pathlib import Path

import ray
from pebble import ProcessExpired, ProcessPool

from rollout.config import RewardConfig
from rollout.data.prompts import LoadedPrompts, Overlong, load_prompts
from rollout.data.tokenizer import Tokenizer, TokenizerFacts, check_fits_model
from rollout.failures import RewardBrokenError, brief
from rollout.processes import redirect_output
from rollout.rewards.call import RewardOutcome, RewardRequest, call_reward, load_reward
from rollout.rewards.sample_rows import SampleRow, group_traces, replace_traces, sample_rows, write_rows
from rollout.types import GroupColumns, PromptGroup, PromptId, Score, ScoredGroup, ScoreStatus

_LOG = logging.getLogger(__name__)
_SHOWN_CHARACTERS = 500
_FEWEST_FAILURES = 16
_FEWEST_PROMPTS = 4
"""A function that has failed for so many responses of so many prompts, and succeeded for none, is broken."""


class Scorer:
    """One tokenizer and one pool of reward workers."""

    def __init__(self, model_directory: str, config: RewardConfig) -> None:
        """Only remembers its arguments; `start` does the work, so that its errors reach the caller as they are."""
        self._directory = model_directory
        self._config = config
        self._tokenizer: Tokenizer | None = None
        self._workers: ProcessPool | None = None
        self._shown: set[ScoreStatus] = set()
        self._has_succeeded = False
        self._num_failed = 0
        self._failed_prompts: set[PromptId] = set()

    def start(self) -> TokenizerFacts:
        """Load the tokenizer and the reward function, start the workers; idempotent.

        Raises ValueError when there is no tokenizer, it does not fit the model, or the reward function's path is bad;
        RewardBrokenError when the function's module fails while it is imported.
        """
        redirect_output()
        facts = self._loaded().facts()
        check_fits_model(facts, self._directory)
        self._started()
        return facts

    def load_prompts(
        self, path: str, *, max_prompt_tokens: int, name: str = "", overlong: Overlong = "refuse", limit: int = 0
    ) -> LoadedPrompts:
        """Read and tokenise a file; see `rollout.data.prompts.load_prompts`."""
        return load_prompts(
            path,
            tokenizer=self._loaded(),
            max_prompt_tokens=max_prompt_tokens,
            name=name,
            overlong=overlong,
            limit=limit,
        )

    def score(self, group: PromptGroup, columns: GroupColumns) -> tuple[Score, ...]:
        """Scores of a group's responses, [G], in order.

        Raises RewardBrokenError when the reward function returns neither a number nor a dict with `score`, or when it
        has failed for every response so far.
        """
        tokenizer, workers = self._loaded(), self._started()
        texts = [tokenizer.decode(columns.response(sample)) for sample in range(len(columns.offsets) - 1)]
        calls = [
            workers.schedule(call_reward, args=(self._request(group, text),), timeout=self._config.timeout_s)
            for text in texts
        ]
        return tuple(self._score(group, text, call) for text, call in zip(texts, calls, strict=True))

    def write_samples(
        self, groups: Sequence[ScoredGroup], *, samples_path: str, traces_path: str, num_returned: int
    ) -> list[SampleRow]:
        """Write a step's samples, and its traces unless their path is empty; returns the first few rows."""
        columns: list[GroupColumns] = ray.get([group.columns for group in groups])
        rows = [
            row
            for group, of_group in zip(groups, columns, strict=True)
            for row in sample_rows(group, of_group, self._loaded())
        ]
        write_rows(Path(samples_path), rows)
        if traces_path:
            pairs = zip(groups, columns, strict=True)
            replace_traces(Path(traces_path), [trace for pair in pairs for trace in group_traces(*pair)])
        return rows[:num_returned]

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        if self._workers is not None:
            self._workers.stop()
            self._workers.join()
            self._workers = None

    def _loaded(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._directory)
        return self._tokenizer

    def _started(self) -> ProcessPool:
        if self._workers is None:
            _import_reward(self._config.function)
            self._workers = ProcessPool(
                max_workers=self._config.num_workers,
                initializer=load_reward,
                initargs=(self._config.function,),
                context=_worker_context(self._config.function),
            )
        return self._workers

    def _request(self, group: PromptGroup, text: str) -> RewardRequest:
        return RewardRequest(
            function=self._config.function,
            data_source=group.prompt.data_source,
            solution_str=text,
            ground_truth=group.prompt.ground_truth,
            extra_info_json=group.prompt.extra_info_json,
        )

    def _score(self, group: PromptGroup, text: str, call: "Future[RewardOutcome]") -> Score:
        try:
            outcome = call.result()
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
        return Score(reward=self._config.failure_score, status=status, error=line)

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


ScorerActor = ray.remote(Scorer)


def _import_reward(function: str) -> None:
    """Import the reward function; an error of the user's module is told from a path that leads nowhere."""
    try:
        load_reward(function)
    except Exception as error:  # the border to the user's code, which may raise anything while it is imported
        reason = error.__cause__ if isinstance(error, ValueError) else error
        module = function.rpartition(".")[0]
        if reason is None or (isinstance(reason, ModuleNotFoundError) and f"{module}.".startswith(f"{reason.name}.")):
            raise
        raise RewardBrokenError(f"reward.function: {function}: importing its module failed: {brief(reason)}") from error


def _worker_context(function: str) -> BaseContext:
    """A fork server that has imported the reward function's module, so that replacing a killed worker costs little.

    Plain fork would copy this process with its threads (tokenizers, ray) in whatever state they are.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", importlib.import_module(function.rpartition(".")[0]).__name__])
    return context
