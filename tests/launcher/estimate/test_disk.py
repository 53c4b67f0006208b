"""Bytes of a run in its directory, against closed forms and a file that is written."""

from pathlib import Path

import numpy as np
import pytest

from history.store.traces import Trace, write_traces
from launcher.estimate.disk import TRACE_TOKEN_BYTES, record_bytes, run_bytes
from megatron_rl.memory import checkpoint_bytes
from tests.launcher.estimate.runs import planned

SHAPE = {
    "num_steps": 1000,
    "algorithm": {"prompts_per_step": 4, "group_size": 8},
    "sampling": {"max_response_tokens": 4000},
    "data": {"train": [{"path": "x"}], "max_prompt_tokens": 200},
}
STEP_TOKENS = 4 * 8 * (100 + 1000)
"""Half of the longest prompt, a quarter of the longest response."""


def test_samples_and_traces_of_all_steps_count_beside_the_checkpoints() -> None:
    run = planned(**SHAPE, checkpoint={"keep_last": 3})
    assert record_bytes(run.config) == 1000 * STEP_TOKENS * 10
    assert run_bytes(run.config, run.spec) == 4 * checkpoint_bytes(run.spec, run.config.trainer) + 352_000_000


def test_steps_that_are_not_kept_do_not_count() -> None:
    """The first step, those that are kept, and those up to the next checkpoint, which removes some."""
    run = planned(**SHAPE, checkpoint={"keep_last_samples": 20, "every": 5}, history={"record_traces": False})
    assert record_bytes(run.config) == 26 * STEP_TOKENS * 4


def test_a_trace_has_about_the_counted_bytes(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 100_000, size=20_000).astype(np.int32)
    path = tmp_path / "step-0.jsonl"
    write_traces(path, [Trace(step=0, prompt_id="a", sample=0, prompt_ids=ids[:9], response_ids=ids, reward=1.0)])
    assert path.stat().st_size / len(ids) == pytest.approx(TRACE_TOKEN_BYTES, rel=0.1)
