"""The process with the tokenizer, as a Ray actor of three parts; logs and messages call it `scorer`.

    PromptLoader      rows of a file  ->  tokenised prompts
    ResponseScorer    a finished group  ->  its scores
    SampleWriter      the scored groups of a step  ->  its files of samples and traces

If its process dies, Ray restarts it under the same handle and repeats the calls that it had (`Processes.
start_text_actor`). So every call may be the first of a process, and may come twice.

All three need the tokenizer. `transformers` imports torch, which the controller must not load, so they share a process
of their own. The parts are plain classes; Ray is used here only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from rollout.config import RewardConfig
from rollout.data.prompts import LoadedPrompts, Overlong, PromptLoader
from rollout.data.tokenizer import Tokenizer, TokenizerFacts, check_fits_model
from rollout.processes import ProcessId, redirect_output, write_stacks_on_signal
from rollout.rewards.sample_rows import SampleRow, SampleWriter
from rollout.rewards.scorer import ResponseScorer
from rollout.types import GroupColumns, PromptGroup, ScoredGroup, ScorerAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextParts:
    """The parts of the actor, ready for use."""

    tokenizer: TokenizerFacts
    prompts: PromptLoader
    scorer: ResponseScorer
    samples: SampleWriter

    @classmethod
    def start(cls, model_directory: str, config: RewardConfig) -> "TextParts":
        """Load the tokenizer and the reward function, and start the reward workers.

        Raises:
            ValueError: there is no tokenizer, it does not fit the model, or the reward function's path is bad.
            RewardBrokenError: the module of the reward function fails while it is imported.
        """
        tokenizer = Tokenizer(model_directory)
        facts = tokenizer.facts()
        check_fits_model(facts, model_directory)
        scorer = ResponseScorer(tokenizer, config)
        scorer.start()
        return cls(tokenizer=facts, prompts=PromptLoader(tokenizer), scorer=scorer, samples=SampleWriter(tokenizer))


@ray.remote
class TextActor:
    """Passes each call to the part that serves it."""

    def __init__(self, model_directory: str, config: RewardConfig) -> None:
        """Only remembers its arguments; `start` does the work, so that its errors reach the caller unwrapped."""
        self._directory = model_directory
        self._config = config
        self._parts: TextParts | None = None

    def start(self) -> TokenizerFacts:
        """See `TextParts.start`; idempotent."""
        return self._started().tokenizer

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def load_prompts(
        self, path: str, *, max_prompt_tokens: int, name: str = "", overlong: Overlong = "refuse", limit: int = 0
    ) -> LoadedPrompts:
        """See `PromptLoader.load`."""
        return self._started().prompts.load(
            path, max_prompt_tokens=max_prompt_tokens, name=name, overlong=overlong, limit=limit
        )

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def score(self, group: PromptGroup, columns: GroupColumns) -> ScorerAnswer:
        """See `ResponseScorer.score`."""
        node_id = str(ray.get_runtime_context().get_node_id())
        return ScorerAnswer(
            scores=self._started().scorer.score(group, columns), process=ProcessId.of_this_process(node_id)
        )

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def write_samples(
        self, groups: Sequence[ScoredGroup], *, samples_path: str, traces_path: str, num_returned: int
    ) -> list[SampleRow]:
        """See `SampleWriter.write`; an empty `traces_path` writes no traces."""
        columns: list[GroupColumns] = ray.get([group.columns for group in groups])
        return self._started().samples.write(
            list(zip(groups, columns, strict=True)),
            samples_path=Path(samples_path),
            traces_path=Path(traces_path) if traces_path else None,
            num_returned=num_returned,
        )

    def close(self) -> None:
        """See `ResponseScorer.close`."""
        if self._parts is not None:
            self._parts.scorer.close()

    def _started(self) -> TextParts:
        if self._parts is None:
            redirect_output()
            write_stacks_on_signal()
            self._parts = TextParts.start(self._directory, self._config)
        return self._parts
