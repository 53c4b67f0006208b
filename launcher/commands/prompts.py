"""Loads prompts in the text actor, which has the tokenizer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from launcher.checks.files import few_prompts
from rollout.config import DataConfig, EvalSetConfig
from rollout.data.order import OrderState, PromptOrder, PromptSet
from rollout.data.prompts import LoadedPrompts
from rollout.evaluation import WHOLE_SET
from rollout.pool.heartbeat import LOOK_EVERY_S, Heartbeat
from rollout.types import Prompt, PromptId

_log = logging.getLogger(__name__)

ONCE = "`python -m examples.recipes.convert` keeps one of each"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPrompts:
    """The files of the training mixture, in the order of the configuration."""

    files: tuple[LoadedPrompts, ...]

    def by_id(self) -> dict[PromptId, Prompt]:
        """Every prompt of the mixture."""
        return {prompt.prompt_id: prompt for file in self.files for prompt in file.prompts}

    def lines(self) -> list[str]:
        """One line of text per file, with the numbers of dropped, truncated and repeated prompts."""
        return [
            f"training prompts {file.name}: {len(file.prompts)}"
            + (f", {file.num_dropped} over-long ones dropped" if file.num_dropped else "")
            + (f", {file.num_truncated} truncated" if file.num_truncated else "")
            + (f", {repeated} repeat an earlier one; {ONCE}" if (repeated := file.num_repeated()) else "")
            for file in self.files
        ]


def load_training_prompts(
    text_actor: ray.actor.ActorHandle, config: DataConfig, *, groups_per_step: int
) -> TrainingPrompts:
    """Read and tokenise the training mixture.

    Raises:
        ValueError: there are fewer prompts than a step draws.
    """
    loading = [
        text_actor.load_prompts.remote(
            file.path, name=file.name, max_prompt_tokens=config.max_prompt_tokens, overlong=config.overlong_prompts
        )
        for file in config.train
    ]
    prompts = TrainingPrompts(files=_loaded(text_actor, loading))
    if problem := few_prompts(len(prompts.by_id()), groups_per_step=groups_per_step):
        raise ValueError(problem)
    return prompts


def load_evaluation_prompts(
    text_actor: ray.actor.ActorHandle, sets: Mapping[str, EvalSetConfig], max_prompt_tokens: int
) -> dict[str, tuple[Prompt, ...]]:
    """Read and tokenise evaluation sets; over-long prompts are refused.

    Public test sets hold a few prompts twice, which causes a warning.

    Raises:
        ValueError: half of the prompts of a set or more repeat earlier ones in all that a reward function receives, or
            one of its data sources has the name of the whole set's figures.
    """
    loading = {
        name: text_actor.load_prompts.remote(
            config.path, name=name, max_prompt_tokens=max_prompt_tokens, overlong="refuse", limit=config.limit
        )
        for name, config in sets.items()
    }
    loaded = _loaded(text_actor, list(loading.values()))
    for file in loaded:
        _judge_repeats(file)
        _refuse_source_of_whole_set(file)
    return {name: file.prompts for name, file in zip(loading, loaded, strict=True)}


def _judge_repeats(evaluation_set: LoadedPrompts) -> None:
    repeated, count = evaluation_set.num_repeated(), len(evaluation_set.prompts)
    if not repeated:
        return
    said = f"evaluation set {evaluation_set.name}: {repeated} of {count} prompts repeat an earlier one"
    if 2 * evaluation_set.num_repeated(with_extra_info=True) >= count:
        raise ValueError(f"{said}; {ONCE}, and `samples_per_prompt` says how often it is sampled")
    _log.warning("%s, so they count more than others; %s", said, ONCE)


def _refuse_source_of_whole_set(evaluation_set: LoadedPrompts) -> None:
    """The only source of a set has no figures of its own, so its name is free."""
    sources = {prompt.data_source for prompt in evaluation_set.prompts}
    if WHOLE_SET in sources and len(sources) > 1:
        raise ValueError(
            f"evaluation set {evaluation_set.name}: one of its {len(sources)} data sources is named {WHOLE_SET!r}, and "
            "its figures would overwrite those of the whole set; give `data_source` of its rows another name"
        )


def _loaded(text_actor: ray.actor.ActorHandle, loading: Sequence[ray.ObjectRef]) -> tuple[LoadedPrompts, ...]:
    """Wait for files, for any time while the text actor's process answers; else it is restarted, and loads again."""
    heartbeat = Heartbeat(text_actor)
    heartbeat.ask()
    while ray.wait(loading, num_returns=len(loading), timeout=LOOK_EVERY_S)[1]:
        if silent_s := heartbeat.missed():
            named = heartbeat.named("the text actor")
            _log.warning("%s has not answered for %.0f s and is restarted", named, silent_s)
            if folders := heartbeat.end():
                _log.warning("the stacks of the text actor are in %s", ", ".join(folders))
    return tuple(ray.get(loading))


def changed_answers(prompts: TrainingPrompts, order: PromptOrder) -> list[str]:
    """One line of text per file whose ground truths were edited since the checkpoint from which `order` started."""
    return [
        f"changed since the checkpoint: ground truths, data_source or extra_info of training prompts "
        f"{prompts.files[number].name}; rewards of the steps from here on follow the new ones"
        for number in order.sets_with_new_answers
    ]


def training_order(prompts: TrainingPrompts, config: DataConfig, *, seed: int, state: OrderState | None) -> PromptOrder:
    """The endless order of the mixture, from its start or from the state of a checkpoint."""
    sets = [
        PromptSet(
            prompt_ids=tuple(prompt.prompt_id for prompt in file.prompts),
            weight=dataset.weight,
            contents=file.contents(),
            answers=file.answers(),
        )
        for file, dataset in zip(prompts.files, config.train, strict=True)
    ]
    return PromptOrder(sets, seed=seed, shuffle=config.shuffle, state=state)
