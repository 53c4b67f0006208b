"""Whether a run's engines draft, from what, and which history they begin with.

What a run refuses is the user's own `history.warm_start` when it cannot be meant; whatever else is wrong
with a history is said, and the run goes on without it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from history.index.segments_dir import segments_dir
from history.store.service import HistoryService
from history.store.snapshot import OtherTokenizerError, SnapshotError
from history.store.warm_start import is_snapshot, read_warm_start
from history.types import prompt_key
from launcher.cluster.processes import Processes
from launcher.config.schema import RunConfig
from rollout.data.tokenizer import TokenizerFacts
from rollout.engine.spec import DraftSpec
from rollout.types import Prompt, PromptId

Say = Callable[[str], None]


def draft_spec(config: RunConfig, engine_id: int, run_id: str) -> DraftSpec | None:
    """How one engine drafts; None for a stock engine."""
    if not config.drafts or engine_id in config.history.baseline_engines:
        return None
    return DraftSpec(max_draft_tokens=config.history.max_draft_tokens, segments_dir=segments_dir(run_id))


def start_drafting(
    config: RunConfig,
    running: Processes,
    facts: TokenizerFacts,
    prompts: Mapping[PromptId, Prompt],
    *,
    run_id: str,
    snapshot: str,
    say: Say,
) -> HistoryService | None:
    """Start the history of a run and fill it with what there is; None where no engine drafts.

    Args:
        config: of the run.
        running: where its processes are started.
        facts: of its tokenizer.
        prompts: all that it will sample, those of evaluations included.
        run_id: names its shared memory.
        snapshot: folder of the history in the checkpoint that the run is resumed from; empty if there is none.
        say: told what is not used, and why.

    Raises ValueError for a warm start of another tokenizer or other prompts.
    """
    if not config.drafts:
        if config.history.drafts and config.deterministic:
            say("engines do not draft: how a deterministic run's batches are made up must not depend on drafts")
        return None
    fingerprint = f"{facts.fingerprint}-{facts.vocab_size}"
    service = running.start_history(config.history, directory=segments_dir(run_id), fingerprint=fingerprint, say=say)
    if snapshot:
        _restore(service, Path(snapshot), say)
    elif config.history.warm_start:
        _warm_start(service, Path(config.history.warm_start), prompts, say)
    return service


def _restore(service: HistoryService, folder: Path, say: Say) -> None:
    try:
        service.restore(folder)
    except SnapshotError as error:
        say(f"the run goes on without its history: {error}")


def _warm_start(service: HistoryService, path: Path, prompts: Mapping[PromptId, Prompt], say: Say) -> None:
    if not is_snapshot(path):
        for batch in read_warm_start(path, {name: prompt.token_ids for name, prompt in prompts.items()}):
            service.append(batch)
        return
    try:
        service.warm_start(path, {prompt_key(name) for name in prompts})
    except OtherTokenizerError as error:
        raise ValueError(f"`history.warm_start`: {error}; leave it out, or name a run of the same model") from error
    except SnapshotError as error:
        say(f"the run begins without the history of `history.warm_start`: {error}")
