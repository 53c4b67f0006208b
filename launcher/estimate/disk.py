"""Bytes that a run needs in its directory. Pure.

Counted are checkpoints with their snapshots of the history, `policy/`, samples, traces, wandb's tables and forwards.
Prompts and responses have the mean lengths that `plan` assumes. Not counted are evaluations, logs, and the history of a
warm start.
"""

from dataclasses import dataclass

from launcher.config.schema import RunConfig
from launcher.estimate.lengths import MEAN_SHARE
from megatron_rl.memory import NO_FURTHER, FurtherSpecs, checkpoint_bytes, num_parameters
from megatron_rl.model.spec import ModelSpec

SAMPLE_TOKEN_BYTES = 4
"""Of a token as text: English and mathematics have about 4 letters a token."""
TRACE_TOKEN_BYTES = 6
"""Of a token id as text, with its comma."""
FORWARD_BYTES = 28
"""Of the record of one engine's forward."""
FORWARD_FILE_BYTES = 4 << 20
"""Records of an engine's forwards are removed in files of this size."""
TABLE_COPIES = 3
"""wandb holds a table of samples in its run's folder, and two copies for the upload (`artifacts/staging`)."""
HISTORY_TOKEN_BYTES = 4
"""Of a token id in a snapshot of the history."""
HISTORY_RESPONSE_BYTES = 32
"""Of a response in a snapshot, beside its tokens: prompt key, step, sample, reward and length."""
LENGTHS_RESPONSE_BYTES = 6
"""Of a response in `lengths.npz`: its length, and its share of its visit's key, step and count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What a run directory holds already of what `run_bytes` counts."""

    checkpoints: int = 0
    """With their snapshots of the history."""
    policy: int = 0
    records: int = 0
    """Samples, traces, wandb's tables, and forwards."""


NOTHING_HELD = HeldBytes()


def run_bytes(
    config: RunConfig, spec: ModelSpec, further: FurtherSpecs = NO_FURTHER, held: HeldBytes = NOTHING_HELD
) -> int:
    """All that is counted, at the end of a run, with the checkpoint and the `policy/` that are being written.

    What is `held` counts no more; but one checkpoint and one `policy/` do, because each is whole before it replaces an
    earlier one.
    """
    lengths = config.num_steps * _step_responses(config) * LENGTHS_RESPONSE_BYTES
    num_checkpoints = config.checkpoint.keep_last + 1
    checkpoints = num_checkpoints * (checkpoint_bytes(spec, config.trainer, further) + lengths)
    checkpoints += _history_bytes(config)
    policy = num_parameters(spec) * (2 if config.trainer.dtype == "bf16" else 4)
    return (
        max(checkpoints - held.checkpoints, checkpoints // num_checkpoints)
        + max(2 * policy - held.policy, policy)
        + record_bytes(config, held)
    )


def record_bytes(config: RunConfig, held: HeldBytes = NOTHING_HELD) -> int:
    """Samples, traces, wandb's tables of samples, and forwards, less those that are `held`.

    Where old samples are removed, those of the steps before the next checkpoint come first (`RunDirectory`).
    """
    checkpoint = config.checkpoint
    steps, least = config.num_steps, 0
    if checkpoint.keep_last_samples and checkpoint.every:
        steps = min(steps, 1 + checkpoint.keep_last_samples + checkpoint.every)
        least = min(steps, checkpoint.every)
    prompt = MEAN_SHARE["prompt_tokens"] * config.data.max_prompt_tokens
    tokens = _step_responses(config) * (prompt + _response_tokens(config))
    token_bytes = SAMPLE_TOKEN_BYTES + TRACE_TOKEN_BYTES * config.history.record_traces
    tables = 0.0
    if config.wandb.mode != "disabled":  # those of all steps stay
        share = min(config.wandb.sample_rows / _step_responses(config), 1.0)
        tables = TABLE_COPIES * config.num_steps * share * tokens * SAMPLE_TOKEN_BYTES
    needed = int(steps * tokens * token_bytes + tables) + _forward_bytes(config)
    return max(needed - held.records, int(least * tokens * token_bytes))


def _step_responses(config: RunConfig) -> int:
    """Most responses of a step."""
    return config.algorithm.max_groups * config.algorithm.group_size


def _response_tokens(config: RunConfig) -> float:
    return MEAN_SHARE["response_tokens"] * config.sampling.max_response_tokens


def _history_bytes(config: RunConfig) -> int:
    """Snapshots of the history in all checkpoints; 0 if no engine drafts.

    Let H be the bytes of the responses that the history holds: of all steps, and at most its budget. The oldest folder
    has at most 2 H (`history.store.snapshot`). Each later one links files of the one before, and adds H at most.
    """
    if not config.drafts:
        return 0
    response = HISTORY_TOKEN_BYTES * _response_tokens(config) + HISTORY_RESPONSE_BYTES
    held = min(config.num_steps * _step_responses(config) * response, config.history.budget_bytes)
    return int((2 + config.checkpoint.keep_last) * held)


def _forward_bytes(config: RunConfig) -> int:
    """Records of all engines' forwards before a checkpoint removes some; those of evaluations are not counted.

    In a step an engine fills its seats until no request waits, and then samples its longest response, which may have
    the most tokens. Drafts, which save forwards, are not counted; nor is a KV cache that holds fewer requests.
    """
    engine, checkpoint = config.engine, config.checkpoint
    longest = config.sampling.max_response_tokens
    requests = -(-_step_responses(config) // engine.num_engines)
    seats = engine.max_num_seqs
    waiting = requests * _response_tokens(config) / seats if requests > seats else 0.0
    step_bytes = (waiting + longest) * FORWARD_BYTES
    engine_bytes = config.num_steps * step_bytes
    if checkpoint.keep_last_samples and checkpoint.every:
        # at worst a closed file, and the begin of the one that is written, are older than the steps that are kept
        steps = checkpoint.keep_last_samples + 2 * checkpoint.every
        engine_bytes = min(engine_bytes, steps * step_bytes + 2 * FORWARD_FILE_BYTES)
    return int(engine.num_engines * engine_bytes)
