"""A whole run that drafts from history and samples ahead: history is remembered, saved, killed and mended."""

import json
import re

import pytest

from history.store.snapshot import read_manifest
from tests.support.runs.drafting_runs import KILLED_AFTER, NUM_PROMPTS, NUM_STEPS, STOPPED_AFTER
from tests.support.runs.whole_runs import rows


@pytest.mark.slow
def test_from_the_second_epoch_on_requests_find_their_history_also_after_it_was_killed(killed):
    steps = rows(killed.run_dir / "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(len(steps))) and len(steps) >= STOPPED_AFTER
    assert all(row["reward/errors"] == row["batch/aborted_responses"] == 0 for row in steps)
    assert all(row["batch/max_staleness"] <= 1 for row in steps)
    hits = [row.get("history/hit_rate") for row in steps]
    assert hits[0] == 0.0  # the second step also samples the first prompts of the next epoch
    assert any(hits[2:KILLED_AFTER])  # on a busy machine a segment may come late, which is no fault
    # the last step may have begun no request: nothing is sampled ahead once the run is to stop
    assert 1.0 in hits[STOPPED_AFTER - 1 :]
    assert sum(row["history/lost_calls"] for row in steps) > 0
    assert all(row["history/lost_calls"] == 0 for row in steps[:KILLED_AFTER])
    assert steps[3]["history/prompts"] == steps[-1]["history/prompts"] == NUM_PROMPTS
    assert 0 < steps[3]["history/reusable_share"] <= 1
    assert all(-1 <= row.get("history/length_rank_correlation", 0) <= 1 for row in steps)
    # how much is drafted is decided by price, that is by the clock: nothing is asked of it here
    # a step that was sampled ahead has no forward of its own
    assert all(row.get("history/tokens_per_forward", 1) >= 1 for row in steps)


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_itself_and_ends_with_its_own_exit_code(killed):
    assert killed.code == 75, killed.output
    step = re.search(r"checkpoint of step (\d+)", killed.output).group(1)
    assert int(step) >= STOPPED_AFTER
    assert f"{step} of {NUM_STEPS} steps" in killed.status and killed.status.startswith("ended ")
    assert json.loads((killed.run_dir / "stopped.json").read_text())["reason"] == "megatron-rl stop"
    manifest = read_manifest(killed.run_dir / "checkpoints" / step / "history")
    assert sum(file.num_tokens for file in manifest.files) > 0
