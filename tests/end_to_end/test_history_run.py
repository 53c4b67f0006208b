"""Whole runs that draft from history: it is remembered, saved, killed, mended, damaged and refused."""

import pytest

from history.store.snapshot import read_manifest
from tests.support.runs.drafting_runs import KILLED_AFTER, NUM_PROMPTS, NUM_STEPS
from tests.support.runs.whole_runs import rows


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
def test_a_checkpoint_holds_the_history_and_a_damaged_one_is_named_and_gone_without(killed, damaged_history):
    manifest = read_manifest(killed / "checkpoints" / str(NUM_STEPS) / "history")
    assert sum(file.num_tokens for file in manifest.files) > 0
    assert "continues without its history" in damaged_history.output
    assert damaged_history.file in damaged_history.output
    assert (damaged_history.last_row["step"], damaged_history.last_row["history/hit_rate"]) == (NUM_STEPS, 0.0)


@pytest.mark.slow
def test_history_of_another_tokenizer_is_refused_on_one_screen_before_any_engine_starts(killed, damaged_history):
    output = damaged_history.refusal_output
    assert damaged_history.refusal == 2
    assert "Traceback" not in output
    assert "another tokenizer" in output
    assert "warm_start" in output
    assert len(output.splitlines()) < 25
    assert not list((damaged_history.refused_dir / "logs").glob("engine-*"))


@pytest.mark.slow
def test_a_run_that_begins_with_the_traces_of_another_finds_history_in_its_first_step(killed, begun_with_traces):
    assert begun_with_traces["history/hit_rate"] == 1.0
    # a BF16 engine with drafts against an FP32 trainer at a low temperature
    assert abs(begun_with_traces["rollout_corr/rollout_is_mean"] - 1) < 0.01
    assert begun_with_traces["rollout_corr/k3_kl"] <= 1e-3
