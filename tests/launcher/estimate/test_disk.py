"""Bytes of a run in its directory, against closed forms and a file that is written."""

from pathlib import Path

import numpy as np
import pytest

from history.store.traces import Trace, write_traces
from launcher.config.schema import RunConfig
from launcher.estimate.disk import FORWARD_BYTES, FORWARD_FILE_BYTES, TRACE_TOKEN_BYTES, record_bytes, run_bytes
from launcher.run_dir.forward_traces import PART_BYTES
from megatron_rl.memory import checkpoint_bytes
from rollout.tracing.forwards import FORWARD
from tests.launcher.estimate.runs import planned

SHAPE = {
    "num_steps": 1000,
    "algorithm": {"prompts_per_step": 4, "group_size": 8},
    "sampling": {"max_response_tokens": 4000},
    "data": {"train": [{"path": "x"}], "max_prompt_tokens": 200},
}
STEP_TOKENS = 4 * 8 * (100 + 1000)
"""Half of the longest prompt, a quarter of the longest response."""
STEP_FORWARDS = 4000
"""The 32 requests have a seat each, so the longest response ends last."""


def test_samples_and_traces_of_all_steps_count_beside_the_checkpoints() -> None:
    run = planned(**SHAPE, checkpoint={"keep_last": 3})
    assert record_bytes(run.config) == 1000 * (STEP_TOKENS * 10 + STEP_FORWARDS * 28)
    checkpoint = checkpoint_bytes(run.spec, run.config.trainer)
    assert run_bytes(run.config, run.spec) == 4 * checkpoint + 352_000_000 + 112_000_000


def test_steps_that_are_not_kept_do_not_count() -> None:
    """The first step, those that are kept, and those up to the next checkpoint, which removes some.

    Forwards go in whole files, which are closed at checkpoints.
    """
    run = planned(**SHAPE, checkpoint={"keep_last_samples": 20, "every": 5}, history={"record_traces": False})
    forwards = (20 + 2 * 5) * STEP_FORWARDS * 28 + 2 * (4 << 20)
    assert record_bytes(run.config) == 26 * STEP_TOKENS * 4 + forwards


@pytest.mark.parametrize(("engines", "seats", "waiting"), [(1, 8, 32 * 1000 / 8), (2, 8, 16 * 1000 / 8), (4, 8, 0)])
def test_forwards_are_those_until_no_request_waits_and_of_the_longest_response(
    engines: int, seats: int, waiting: float
) -> None:
    base = {"model": "m", "run_dir": "r", **SHAPE, "engine": {"num_engines": engines, "max_num_seqs": seats}}
    config = RunConfig.model_validate(base)
    assert record_bytes(config) == 1000 * (STEP_TOKENS * 10 + engines * (waiting + 4000) * 28)


def test_a_long_run_of_many_engines_has_gigabytes_of_forwards() -> None:
    base = {"model": "m", "run_dir": "r", "num_steps": 800, "data": {"train": [{"path": "x"}]}}
    config = RunConfig.model_validate(
        {**base, "engine": {"num_engines": 64}, "sampling": {"max_response_tokens": 30_000}}
    )
    assert record_bytes(config) > 64 * 30_000 * 800 * 28 > 40e9


def test_records_and_files_of_forwards_have_the_counted_bytes() -> None:
    assert (FORWARD.itemsize, PART_BYTES) == (FORWARD_BYTES, FORWARD_FILE_BYTES)


def test_a_trace_has_about_the_counted_bytes(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 100_000, size=20_000).astype(np.int32)
    path = tmp_path / "step-0.jsonl"
    write_traces(path, [Trace(step=0, prompt_id="a", sample=0, prompt_ids=ids[:9], response_ids=ids, reward=1.0)])
    assert path.stat().st_size / len(ids) == pytest.approx(TRACE_TOKEN_BYTES, rel=0.1)
