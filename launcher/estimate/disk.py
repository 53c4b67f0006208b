"""Bytes that a run needs in its directory. Pure."""

from launcher.config.schema import RunConfig
from launcher.estimate.lengths import MEAN_SHARE
from megatron_rl.memory import NO_FURTHER, FurtherSpecs, checkpoint_bytes
from megatron_rl.model.spec import ModelSpec

SAMPLE_TOKEN_BYTES = 4
"""Of a token as text: English and mathematics have about 4 letters a token."""
TRACE_TOKEN_BYTES = 6
"""Of a token id as text, with its comma."""
FORWARD_BYTES = 28
"""Of the record of one engine's forward."""
FORWARD_FILE_BYTES = 4 << 20
"""Records of an engine's forwards are removed in files of this size."""


def run_bytes(config: RunConfig, spec: ModelSpec, further: FurtherSpecs = NO_FURTHER) -> int:
    """Checkpoints, samples and traces at the end of a run, and the checkpoint that is being written."""
    return checkpoint_bytes(spec, config.trainer, further) * (config.checkpoint.keep_last + 1) + record_bytes(config)


def record_bytes(config: RunConfig) -> int:
    """Samples, traces and forwards, if prompts and responses have the mean lengths that `plan` assumes."""
    checkpoint, algorithm = config.checkpoint, config.algorithm
    steps = config.num_steps
    if checkpoint.keep_last_samples and checkpoint.every:
        steps = min(steps, 1 + checkpoint.keep_last_samples + checkpoint.every)
    prompt = MEAN_SHARE["prompt_tokens"] * config.data.max_prompt_tokens
    response = MEAN_SHARE["response_tokens"] * config.sampling.max_response_tokens
    token_bytes = SAMPLE_TOKEN_BYTES + TRACE_TOKEN_BYTES * config.history.record_traces
    tokens = algorithm.max_groups * algorithm.group_size * (prompt + response)
    return int(steps * tokens * token_bytes) + _forward_bytes(config)


def _forward_bytes(config: RunConfig) -> int:
    """Records of all engines' forwards before a checkpoint removes some; those of evaluations are not counted.

    In a step an engine fills its seats until no request waits, and then samples its longest response, which may have
    the most tokens. Drafts, which save forwards, are not counted; nor is a KV cache that holds fewer requests.
    """
    engine, checkpoint, algorithm = config.engine, config.checkpoint, config.algorithm
    longest = config.sampling.max_response_tokens
    requests = -(-algorithm.max_groups * algorithm.group_size // engine.num_engines)
    seats = engine.max_num_seqs
    waiting = requests * MEAN_SHARE["response_tokens"] * longest / seats if requests > seats else 0.0
    step_bytes = (waiting + longest) * FORWARD_BYTES
    engine_bytes = config.num_steps * step_bytes
    if checkpoint.keep_last_samples and checkpoint.every:
        # at worst a closed file, and the begin of the one that is written, are older than the steps that are kept
        steps = checkpoint.keep_last_samples + 2 * checkpoint.every
        engine_bytes = min(engine_bytes, steps * step_bytes + 2 * FORWARD_FILE_BYTES)
    return int(engine.num_engines * engine_bytes)
