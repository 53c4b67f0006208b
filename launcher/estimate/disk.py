"""Bytes that a run needs in its directory. Pure."""

from launcher.config.schema import RunConfig
from launcher.estimate.lengths import MEAN_SHARE
from megatron_rl.memory import NO_FURTHER, FurtherSpecs, checkpoint_bytes
from megatron_rl.model.spec import ModelSpec

SAMPLE_TOKEN_BYTES = 4
"""Of a token as text: English and mathematics have about 4 letters a token."""
TRACE_TOKEN_BYTES = 6
"""Of a token id as text, with its comma."""


def run_bytes(config: RunConfig, spec: ModelSpec, further: FurtherSpecs = NO_FURTHER) -> int:
    """Checkpoints, samples and traces at the end of a run, and the checkpoint that is being written."""
    return checkpoint_bytes(spec, config.trainer, further) * (config.checkpoint.keep_last + 1) + record_bytes(config)


def record_bytes(config: RunConfig) -> int:
    """Samples and traces, if prompts and responses have the mean lengths that `plan` assumes."""
    checkpoint, algorithm = config.checkpoint, config.algorithm
    steps = config.num_steps
    if checkpoint.keep_last_samples and checkpoint.every:
        steps = min(steps, 1 + checkpoint.keep_last_samples + checkpoint.every)
    prompt = MEAN_SHARE["prompt_tokens"] * config.data.max_prompt_tokens
    response = MEAN_SHARE["response_tokens"] * config.sampling.max_response_tokens
    token_bytes = SAMPLE_TOKEN_BYTES + TRACE_TOKEN_BYTES * config.history.record_traces
    return int(steps * algorithm.max_groups * algorithm.group_size * (prompt + response) * token_bytes)
