"""Drafting of a run's engines: specification, start of the history service and its first contents.

A `history.warm_start` of another tokenizer or other prompts is refused. Every other unusable history is reported, and
the run continues without it.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from history.config import HistoryConfig
from history.index.segments_dir import segments_dir
from history.store.prompt_store import RESPONSE_BYTES
from history.store.service import HistoryService
from history.store.snapshot import OtherTokenizerError, SnapshotError
from history.store.warm_start import is_snapshot, read_warm_start
from history.types import Epoch, TokenIds, prompt_key
from launcher.cluster.processes import Processes
from launcher.commands.prompts import TrainingPrompts
from launcher.config.schema import RunConfig
from launcher.estimate.host_memory import segment_budget
from launcher.estimate.lengths import MEAN_SHARE
from rollout.data.tokenizer import TokenizerFacts
from rollout.engine.spec import DraftSpec
from rollout.types import Prompt, PromptId

Say = Callable[[str], None]


def draft_spec(config: RunConfig, engine_id: int, run_id: str) -> DraftSpec | None:
    """Drafting of one engine; None for an engine that does not draft."""
    if not config.drafts or engine_id in config.history.baseline_engines:
        return None
    return DraftSpec(max_draft_tokens=config.history.max_draft_tokens, segments_dir=segments_dir(run_id))


def start_history(
    config: RunConfig, running: Processes, facts: TokenizerFacts, *, run_id: str, say: Say
) -> HistoryService | None:
    """Start the empty history of a run; None if no engine drafts.

    Args:
        config: configuration of the run.
        running: processes of the run; the history's are added.
        facts: facts of the run's tokenizer.
        run_id: part of the names of shared memory.
        say: receives a line if a deterministic run prevents drafting.
    """
    if not config.drafts:
        if config.history.drafts and config.deterministic:
            say("engines do not draft: the batches of a deterministic run must not depend on drafts")
        return None
    fingerprint = f"{facts.fingerprint}-{facts.vocab_size}"
    bounded = config.history.model_copy(update={"shm_bytes": segment_budget(config)})
    return running.start_history(bounded, directory=segments_dir(run_id), fingerprint=fingerprint, say=say)


def data_epochs(config: RunConfig, training: TrainingPrompts) -> list[Epoch]:
    """The data sets of the mixture with the steps of their epochs.

    With dynamic sampling a step draws more prompts, so that epochs are shorter; the share of all data sets is the same.
    """
    weights = [dataset.weight for dataset in config.data.train]
    return [
        Epoch(
            prompt_keys=np.array([prompt_key(prompt.prompt_id) for prompt in file.prompts], dtype=np.int64),
            num_steps=math.ceil(len(file.prompts) * sum(weights) / (weight * config.algorithm.prompts_per_step)),
        )
        for file, weight in zip(training.files, weights, strict=True)
    ]


def small_budget(config: RunConfig, num_prompts: int) -> str:
    """A line for a history that cannot keep the responses until their prompts come again; empty if it can.

    Mean lengths are those that `plan` assumes. With dynamic sampling a step may draw its most groups.
    """
    algorithm = config.algorithm
    if not config.drafts or config.num_steps * algorithm.max_groups <= num_prompts:
        return ""  # no prompt comes again
    tokens = MEAN_SHARE["response_tokens"] * config.sampling.max_response_tokens
    needed = num_prompts * algorithm.group_size * int(4 * tokens + RESPONSE_BYTES)
    budget = config.history.budget_bytes
    if budget >= needed:
        return ""
    return (
        f"`history.budget_bytes` = {budget} holds about {budget / needed:.0%} of the responses of an epoch "
        f"({num_prompts} prompts, {algorithm.group_size} responses of {tokens:.0f} tokens); the other prompts have no "
        f"drafts when they come again. About {needed} bytes hold all, spread over the shards' nodes"
    )


def fill_history(
    service: HistoryService, config: HistoryConfig, prompts: Mapping[PromptId, Prompt], *, snapshot: str, say: Say
) -> None:
    """Load the snapshot of a checkpoint into an empty history, or else the warm start of the configuration.

    Args:
        service: the empty history.
        config: configuration of the history.
        prompts: all prompts of the run, those of evaluations included.
        snapshot: history folder of the checkpoint that the run resumes from; empty if there is none.
        say: receives a line for a history that cannot be used, with the reason.

    Raises ValueError for a warm start of another tokenizer or other prompts.
    """
    if snapshot:
        _restore(service, Path(snapshot), say)
    elif config.warm_start:
        _warm_start(service, config, prompts, say)


def _restore(service: HistoryService, folder: Path, say: Say) -> None:
    try:
        service.restore(folder)
    except SnapshotError as error:
        say(f"the run continues without its history: {error}")


def _warm_start(service: HistoryService, config: HistoryConfig, prompts: Mapping[PromptId, Prompt], say: Say) -> None:
    path = Path(config.warm_start)
    if not is_snapshot(path):
        token_ids: dict[str, TokenIds] = {name: prompt.token_ids for name, prompt in prompts.items()}
        service.append_all(read_warm_start(path, token_ids, budget_bytes=config.budget_bytes, say=say))
        return
    try:
        service.warm_start(path, {prompt_key(name) for name in prompts})
    except OtherTokenizerError as error:
        raise ValueError(f"`history.warm_start`: {error}; leave it out, or name a run of the same model") from error
    except SnapshotError as error:
        say(f"the run starts without the history of `history.warm_start`: {error}")
