"""Runs the evaluation sets on the engines of a pool, in their weight format."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollout.config import EvalSetConfig
from rollout.evaluation import EvaluationRow, evaluation_rows, settings_digest
from rollout.pool.callbacks import Progress
from rollout.pool.engine_pool import EnginePool
from rollout.seeds import derive_seed
from rollout.types import GroupId, Prompt, PromptGroup, SamplingSpec

FIRST_GROUP_ID = 1 << 48
"""First number of evaluation groups, so that training groups have the same numbers with and without evaluation."""


class Evaluator:
    """Named evaluation sets with their prompts."""

    def __init__(
        self,
        sets: Mapping[str, EvalSetConfig],
        prompts: Mapping[str, Sequence[Prompt]],
        *,
        format: str,
        seed: int,
        stop_token_ids: Sequence[int],
        run_settings: str,
    ) -> None:
        """`stop_token_ids` end a response beside the model's own, as in training.

        `run_settings` is the `rollout.evaluation.run_settings_digest` of every row.

        Raises:
            OSError: the file of a set cannot be read.
        """
        self._stop_token_ids = tuple(stop_token_ids)
        self._sets = dict(sets)
        self._run_settings = run_settings
        self._settings = {name: settings_digest(config) for name, config in sets.items()}
        self._prompts = dict(prompts)
        self._format = format
        self._seed = seed
        self._next_id = FIRST_GROUP_ID

    def upcoming(self, finished_steps: int) -> list[PromptGroup]:
        """The groups that `admit` would admit now, in order."""
        groups: list[PromptGroup] = []
        for name in self._sets:
            groups += self._groups(name, finished_steps, self._next_id + len(groups))
        return groups

    def evaluate(
        self, pool: EnginePool, finished_steps: int, *, progress: Progress | None = None
    ) -> list[EvaluationRow]:
        """Sample and score every set; rows in the order of the configuration."""
        self.admit(pool, finished_steps)
        return self.take(pool, finished_steps, progress=progress)

    def admit(self, pool: EnginePool, finished_steps: int) -> None:
        """Admit all sets at once, so that engines wait for the longest answers once and not for those of each set."""
        groups = self.upcoming(finished_steps)
        self._next_id += len(groups)
        if groups:
            pool.admit(groups)

    def take(self, pool: EnginePool, finished_steps: int, *, progress: Progress | None = None) -> list[EvaluationRow]:
        """Wait for the sets that `admit` has admitted; rows in the order of the configuration."""
        rows: list[EvaluationRow] = []
        for name in self._sets:
            scored = pool.take(name, finished_steps, progress=progress)
            rows += evaluation_rows(
                name, scored, format=self._format, step=finished_steps, settings=self._settings[name]
            )
        return [replace(row, run_settings=self._run_settings) for row in rows]

    def _groups(self, name: str, finished_steps: int, first_id: int) -> list[PromptGroup]:
        """The groups of a set, numbered from `first_id`; the same seeds at every step."""
        config = self._sets[name]
        sampling = SamplingSpec(
            temperature=config.temperature,
            top_p=config.top_p,
            max_response_tokens=config.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
        )
        return [
            PromptGroup(
                group_id=GroupId(first_id + index),
                step=finished_steps,
                purpose=name,
                prompt=prompt,
                sampling=sampling,
                seeds=tuple(
                    derive_seed(self._seed, purpose=name, step=0, prompt_id=prompt.prompt_id, sample=sample)
                    for sample in range(config.samples_per_prompt)
                ),
            )
            for index, prompt in enumerate(self._prompts[name])
        ]
