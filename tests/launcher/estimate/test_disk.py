"""Bytes of a run in its directory, against closed forms and a file that is written."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from history.lengths.book import LengthBook
from history.store.prompt_store import RESPONSE_BYTES, PromptStore
from history.store.response_batch import ResponseBatch
from history.store.snapshot import SnapshotWriter
from history.store.traces import Trace, write_traces
from history.types import PastResponse
from launcher.config.schema import RunConfig
from launcher.estimate.disk import (
    FORWARD_BYTES,
    FORWARD_FILE_BYTES,
    HISTORY_RESPONSE_BYTES,
    HISTORY_TOKEN_BYTES,
    LENGTHS_RESPONSE_BYTES,
    NOTHING_HELD,
    SAMPLE_TOKEN_BYTES,
    TRACE_TOKEN_BYTES,
    HeldBytes,
    record_bytes,
    run_bytes,
)
from launcher.run_dir.forward_traces import PART_BYTES
from megatron_rl.memory import checkpoint_bytes
from rollout.tracing.forwards import FORWARD
from tests.launcher.estimate.runs import LINEAR, OUTPUT, planned

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
STEP_TABLE = 3 * 16 * (100 + 1000) * 4
"""Half of the responses are in wandb's table, which lies on the disk three times."""


def test_samples_traces_and_tables_of_all_steps_count_beside_the_checkpoints() -> None:
    run = planned(**SHAPE, checkpoint={"keep_last": 3}, history={"drafts": False})
    assert record_bytes(run.config) == 1000 * (STEP_TOKENS * 10 + STEP_FORWARDS * 28 + STEP_TABLE)
    checkpoint = checkpoint_bytes(run.spec, run.config.trainer) + 1000 * 4 * 8 * 6
    policy = run_bytes(run.config, run.spec) - 4 * checkpoint - 352_000_000 - 112_000_000 - 211_200_000
    assert policy == pytest.approx(2 * 2 * (LINEAR + 2 * OUTPUT), rel=0.001), "without norms"


@pytest.mark.parametrize(
    ("tracking", "table"),
    [({"sample_rows": 64}, 2 * STEP_TABLE), ({"sample_rows": 0}, 0), ({"mode": "disabled"}, 0)],
    ids=["more rows than responses", "no rows", "disabled"],
)
def test_wandbs_tables_count_as_far_as_they_are_logged(tracking: dict[str, object], table: int) -> None:
    config = planned(**SHAPE, wandb=tracking).config
    assert record_bytes(config) == 1000 * (STEP_TOKENS * 10 + STEP_FORWARDS * 28 + table)


@pytest.mark.parametrize(
    ("budget", "held"), [(1 << 40, 1000 * 32 * (4 * 1000 + 32)), (1 << 20, 1 << 20)], ids=["all of the run", "budget"]
)
def test_the_history_counts_twice_and_once_more_for_each_further_checkpoint(budget: int, held: int) -> None:
    with_it, without = (
        planned(**SHAPE, checkpoint={"keep_last": 3}, history={"budget_bytes": budget, "drafts": drafts})
        for drafts in (True, False)
    )
    assert run_bytes(with_it.config, with_it.spec) - run_bytes(without.config, without.spec) == (2 + 3) * held


def test_what_the_directory_holds_does_not_count_again_beyond_one_checkpoint_and_one_policy() -> None:
    run = planned(**SHAPE, checkpoint={"keep_last": 3}, history={"drafts": False})
    needed = partial(run_bytes, run.config, run.spec)
    checkpoint = checkpoint_bytes(run.spec, run.config.trainer) + 1000 * 4 * 8 * 6
    records = record_bytes(run.config)
    policy = (needed() - 4 * checkpoint - records) // 2
    assert needed(held=NOTHING_HELD) == needed()
    for num_held, num_needed in ((1, 3), (3, 1), (4, 1), (9, 1)):
        assert needed() - needed(held=HeldBytes(checkpoints=num_held * checkpoint)) == (4 - num_needed) * checkpoint
    for num_held in (1, 2, 5):
        assert needed() - needed(held=HeldBytes(policy=num_held * policy)) == policy
    for num_bytes in (1, records, 10 * records):
        assert needed() - needed(held=HeldBytes(records=num_bytes)) == min(num_bytes, records)


def test_samples_until_the_next_checkpoint_need_room_beside_old_ones_that_it_removes() -> None:
    whole = planned(**SHAPE, wandb={"mode": "disabled"}, checkpoint={"every": 5}).config
    kept = planned(**SHAPE, wandb={"mode": "disabled"}, checkpoint={"every": 5, "keep_last_samples": 10}).config
    of_a_step = STEP_TOKENS * (SAMPLE_TOKEN_BYTES + TRACE_TOKEN_BYTES)
    assert record_bytes(kept, HeldBytes(records=record_bytes(whole))) == 5 * of_a_step
    assert record_bytes(whole, HeldBytes(records=record_bytes(whole))) == 0


@pytest.mark.parametrize("changed", [0.1, 0.45, 1.0])
def test_snapshots_of_kept_checkpoints_have_at_most_the_counted_bytes(tmp_path: Path, changed: float) -> None:
    """Saves of a history of constant size, of which a share of the prompts changes between two checkpoints."""
    random, num_prompts, length, keep_last = np.random.default_rng(0), 100, 500, 2
    kept = PromptStore(budget_bytes=1 << 30, kept_steps=1, reuse_share=lambda before, now: 0.5)
    writer, folders, most = SnapshotWriter(0, 1), [], 0
    for step in range(40):
        keys = random.choice(num_prompts, int(changed * num_prompts), replace=False) if step else range(num_prompts)
        for key in (int(key) for key in keys):
            kept.append(key, [PastResponse(token_ids=np.zeros(length, np.int32), step=step, sample=0)])
            kept.note_rewards(key, step, [1.0])
        (tmp_path / str(step)).mkdir()
        writer.save(kept, tmp_path / str(step), folders[-1] if folders else None)
        folders = [*folders, tmp_path / str(step)][-keep_last - 1 :]
        files = {path.stat().st_ino: path.stat().st_size for folder in folders for path in folder.iterdir()}
        most = max(most, sum(files.values()))
    held = num_prompts * (HISTORY_TOKEN_BYTES * length + HISTORY_RESPONSE_BYTES)
    assert held <= most <= (2 + keep_last) * held


def test_responses_have_the_counted_bytes_in_snapshots_and_fewer_than_the_budget_counts() -> None:
    responses = [(1, PastResponse(token_ids=np.zeros(7, np.int32), step=0, sample=number)) for number in range(9)]
    counted = 9 * (7 * HISTORY_TOKEN_BYTES + HISTORY_RESPONSE_BYTES)
    assert sum(array.nbytes for array in ResponseBatch.of(responses).arrays) == counted
    assert HISTORY_RESPONSE_BYTES < RESPONSE_BYTES


def test_steps_that_are_not_kept_do_not_count() -> None:
    """The first step, those that are kept, and those up to the next checkpoint, which removes some.

    Forwards go in whole files, which are closed at checkpoints.
    """
    run = planned(**SHAPE, checkpoint={"keep_last_samples": 20, "every": 5}, history={"record_traces": False})
    forwards = (20 + 2 * 5) * STEP_FORWARDS * 28 + 2 * (4 << 20)
    assert record_bytes(run.config) == 26 * STEP_TOKENS * 4 + 1000 * STEP_TABLE + forwards


@pytest.mark.parametrize(("engines", "seats", "waiting"), [(1, 8, 32 * 1000 / 8), (2, 8, 16 * 1000 / 8), (4, 8, 0)])
def test_forwards_are_those_until_no_request_waits_and_of_the_longest_response(
    engines: int, seats: int, waiting: float
) -> None:
    base = {"model": "m", "run_dir": "r", **SHAPE, "engine": {"num_engines": engines, "max_num_seqs": seats}}
    config = RunConfig.model_validate(base)
    assert record_bytes(config) == 1000 * (STEP_TOKENS * 10 + STEP_TABLE + engines * (waiting + 4000) * 28)


def test_a_long_run_of_many_engines_has_gigabytes_of_forwards() -> None:
    base = {"model": "m", "run_dir": "r", "num_steps": 800, "data": {"train": [{"path": "x"}]}}
    config = RunConfig.model_validate(
        {**base, "engine": {"num_engines": 64}, "sampling": {"max_response_tokens": 30_000}}
    )
    assert record_bytes(config) > 64 * 30_000 * 800 * 28 > 40e9


def test_lengths_of_groups_of_8_have_about_the_counted_bytes(tmp_path: Path) -> None:
    book, path = LengthBook(), tmp_path / "lengths.npz"
    for key in range(2000):
        book.observe(key, 0, [20_000] * 8)
    book.save(path)
    assert path.stat().st_size / (2000 * 8) == pytest.approx(LENGTHS_RESPONSE_BYTES, rel=0.1)


def test_records_and_files_of_forwards_have_the_counted_bytes() -> None:
    assert (FORWARD.itemsize, PART_BYTES) == (FORWARD_BYTES, FORWARD_FILE_BYTES)


def test_a_trace_has_about_the_counted_bytes(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 100_000, size=20_000).astype(np.int32)
    path = tmp_path / "step-0.jsonl"
    write_traces(path, [Trace(step=0, prompt_id="a", sample=0, prompt_ids=ids[:9], response_ids=ids, reward=1.0)])
    assert path.stat().st_size / len(ids) == pytest.approx(TRACE_TOKEN_BYTES, rel=0.1)
