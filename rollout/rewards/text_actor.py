"""The process that turns text into prompts and responses into text, as a Ray actor of two parts: the text actor.

    PromptLoader      rows of a file  ->  tokenised prompts
    SampleWriter      the scored groups of a step  ->  its files of samples and traces

It does not score, so writing never delays a score. If its process dies, Ray restarts it under the same handle and
repeats the calls that it had. So every call may be the first of a process, and may come twice.

Both parts need the tokenizer. `transformers` imports torch, which the controller must not load, so they share a process
of their own. The parts are plain classes; Ray is used here only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from rollout.data.prompts import LoadedPrompts, Overlong, PromptLoader
from rollout.data.tokenizer import Tokenizer, TokenizerFacts, TokenizerSource, check_fits_model
from rollout.group_parts import joined
from rollout.processes import ProcessId, no_collection, redirect_output, write_stacks_on_signal
from rollout.rewards.sample_rows import SampleRow, SampleWriter
from rollout.types import GroupColumns, GroupId, ScoredGroup

_BESIDE_WORK = "beside_work"
"""Concurrency group of a call that is answered while another one works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextParts:
    """The parts of the actor, ready for use."""

    tokenizer: TokenizerFacts
    prompts: PromptLoader
    samples: SampleWriter

    @classmethod
    def start(cls, source: TokenizerSource) -> "TextParts":
        """Load the tokenizer.

        Raises:
            ValueError: there is no tokenizer, or it does not fit the model.
        """
        tokenizer = Tokenizer(source)
        facts = tokenizer.facts()
        check_fits_model(facts, source.directory)
        return cls(tokenizer=facts, prompts=PromptLoader(tokenizer), samples=SampleWriter(tokenizer))


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSamples:
    """Answer of a text actor that has written the samples of a step."""

    rows: list[SampleRow]
    """As many as were asked for."""
    process: ProcessId
    """The text actor's process; another one than before means that it died and was restarted."""
    num_lost: int = 0
    """Groups that could not be written, because their tokens were lost with a node."""


@ray.remote(concurrency_groups={_BESIDE_WORK: 1})
class TextActor:
    """Passes each call to the part that serves it."""

    def __init__(self, source: TokenizerSource) -> None:
        """Only remembers its arguments; `start` does the work, so that its errors reach the caller unwrapped."""
        self._source = source
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
    def write_samples(
        self, groups: Sequence[ScoredGroup], *, samples_path: str, traces_path: str, num_returned: int
    ) -> WrittenSamples:
        """See `SampleWriter.write`; an empty `traces_path` writes no traces."""
        lost: list[GroupId] = []
        rows = self._started().samples.write(
            _with_columns(groups, lost),
            samples_path=Path(samples_path),
            traces_path=Path(traces_path) if traces_path else None,
            num_returned=num_returned,
        )
        return WrittenSamples(rows=rows, process=_this_process(), num_lost=len(lost))

    @ray.method(concurrency_group=_BESIDE_WORK)  # type: ignore[untyped-decorator]
    def alive(self) -> ProcessId:
        """The process; the call of `rollout.pool.heartbeat`."""
        return _this_process()

    def close(self) -> None:
        """Nothing to end; `Processes.end` calls it for every actor."""

    def _started(self) -> TextParts:
        if self._parts is None:
            redirect_output()
            write_stacks_on_signal()
            with no_collection():
                self._parts = TextParts.start(self._source)
        return self._parts


def _with_columns(groups: Sequence[ScoredGroup], lost: list[GroupId]) -> Iterator[tuple[ScoredGroup, GroupColumns]]:
    """Each group with its tokens, which are fetched when its turn comes and may leave the memory after it.

    Groups whose tokens were lost with a node are left out and added to `lost`.
    """
    for group in groups:
        try:
            columns = joined(ray.get(list(group.columns)))
        except ray.exceptions.ObjectLostError:
            lost.append(group.group.group_id)
        else:
            yield group, columns


def _this_process() -> ProcessId:
    return ProcessId.of_this_process(str(ray.get_runtime_context().get_node_id()))
