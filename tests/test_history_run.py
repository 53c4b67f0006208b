"""Whole runs that draft from history: it is remembered, saved, killed, mended, damaged and refused."""

import json
import shutil

import pytest

from history.snapshot import MANIFEST, read_manifest
from tests.drafting_runs import KILLED_AFTER, NUM_PROMPTS, NUM_STEPS, drafting
from tests.whole_runs import DEADLINE_S, finish, rows, start


@pytest.mark.slow
def test_from_the_second_epoch_on_requests_find_their_history_also_after_it_was_killed(killed):
    found = rows(killed / "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(NUM_STEPS))
    assert all(row["reward/errors"] == row["batch/aborted_responses"] == 0 for row in found)
    hits = [row["history/hit_rate"] for row in found]
    assert hits[:2] == [0.0, 0.0]
    assert all(hit > 0 for hit in hits[2:KILLED_AFTER])
    assert hits[-1] == 1.0
    assert sum(row["history/lost_calls"] for row in found) > 0
    assert all(row["history/lost_calls"] == 0 for row in found[:KILLED_AFTER])
    assert found[3]["history/prompts"] == found[-1]["history/prompts"] == NUM_PROMPTS
    assert 0 < found[3]["history/reusable_share"] <= 1
    assert all(-1 <= row.get("history/length_rank_correlation", 0) <= 1 for row in found)
    # how much is drafted is decided by price, that is by the clock: nothing is asked of it here
    assert all(row["history/tokens_per_forward"] >= 1 for row in found)


@pytest.mark.slow
def test_a_checkpoint_holds_the_history_and_a_damaged_one_is_named_and_gone_without(example, killed):
    folder = killed / "checkpoints" / str(NUM_STEPS) / "history"
    manifest = read_manifest(folder)
    assert sum(file.num_tokens for file in manifest.files) > 0
    name = manifest.files[-1].name
    damaged = bytearray((folder / name).read_bytes())
    damaged[-1] ^= 1
    (folder / name).unlink()  # it is linked from other checkpoints
    (folder / name).write_bytes(damaged)
    output = finish(start(drafting(example), killed, f"num_steps={NUM_STEPS + 1}"))
    assert "goes on without its history" in output
    assert name in output
    last = rows(killed / "metrics.jsonl")[-1]
    assert (last["step"], last["history/hit_rate"]) == (NUM_STEPS, 0.0)


@pytest.mark.slow
def test_history_of_another_tokenizer_is_refused_on_one_screen_before_any_engine_starts(example, killed):
    folder = example / "foreign"
    shutil.copytree(killed / "checkpoints" / str(NUM_STEPS + 1) / "history", folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "fingerprint": "another"}))
    run = start(drafting(example), example / "refused", f"history.warm_start={folder}")
    output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 2
    assert "Traceback" not in output
    assert "another tokenizer" in output
    assert "warm_start" in output
    assert len(output.splitlines()) < 25
    assert not list((example / "refused" / "logs").glob("engine-*"))


@pytest.mark.slow
def test_a_run_that_begins_with_the_traces_of_another_finds_history_in_its_first_step(example, killed):
    run_dir = example / "warm"
    overrides = ["num_steps=1", "sampling.temperature=0.6", f"history.warm_start={killed / 'traces'}"]
    finish(start(drafting(example), run_dir, *overrides))
    (row,) = rows(run_dir / "metrics.jsonl")
    assert row["history/hit_rate"] == 1.0
    # a BF16 engine with drafts against an FP32 trainer at a low temperature
    assert abs(row["rollout_corr/rollout_is_mean"] - 1) < 0.01
    assert row["rollout_corr/k3_kl"] <= 1e-3
