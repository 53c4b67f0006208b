"""Whole runs through the command line, with real trainer ranks and engines: repeatable, resumable, honest.

Four steps of a tiny mixture of experts that are spread over two trainer ranks. The deterministic run is started once to
its end, and once more under a clock that jumps, with a kill (-9) at a point drawn at random, in half of the sessions
during a save. In a third one, its trainer is lost twice.
"""

import json
import os
import re

import pytest

from megatron_rl.controller.publisher import MAX_WEIGHT_GAP
from tests.support.runs.whole_runs import EXPERTS, NUM_STEPS, PROGRESS_TIMEOUT_S, metrics, rows


@pytest.mark.slow
def test_a_run_learns_from_what_its_engines_sampled_and_says_so(uninterrupted):
    steps = rows(uninterrupted / "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(NUM_STEPS))
    for row in steps:
        assert row["actor/optimizer_steps"] == 2
        assert row["actor/skipped_updates"] == row["reward/errors"] == row["batch/max_staleness"] == 0
        assert row["publish/weight_version"] == row["step"] + 1
        # BF16 engine against FP32 trainer at temperature 1
        assert abs(row["rollout_corr/rollout_is_mean"] - 1) < 0.01
        assert 0 <= row["rollout_corr/k3_kl"] < 1e-3
        assert 0 < row["publish/weight_gap_max"] < MAX_WEIGHT_GAP  # an expert rounds to BF16 several times
        assert 0 < row["timeline/trainer_wait_share"] < row["timeline/idle_share"] < 1
    for step in range(NUM_STEPS):
        samples = rows(uninterrupted / "samples" / f"step-{step}.jsonl")
        assert len(samples) == 16
        assert all(row["versions"] == [[step, row["length"]]] for row in samples)
        traces = rows(uninterrupted / "traces" / f"step-{step}.jsonl")
        assert [len(trace["response_ids"]) for trace in traces] == [row["length"] for row in samples]
    assert (uninterrupted / "policy" / "model.safetensors").exists()
    timeline = json.loads((uninterrupted / "timeline.json").read_text())
    names = {event["args"]["name"] for event in timeline["traceEvents"] if event["name"] == "thread_name"}
    assert names >= {"engine 0", "trainer", "publisher", "steps"} and timeline["otherData"]["notes"] == []
    assert "http://" not in (uninterrupted / "report.html").read_text().replace("http://www.w3.org", "")
    assert sorted(path.name for path in (uninterrupted / "checkpoints").iterdir()) == ["3", "4", "latest"]


@pytest.mark.slow
def test_a_run_that_was_killed_under_a_clock_that_jumps_ends_as_if_nothing_had_happened(uninterrupted, interrupted):
    print(f"kill point drawn with seed {interrupted.seed}")
    run_dir = interrupted.run_dir
    assert metrics(run_dir) == metrics(uninterrupted)
    assert_same_run(run_dir, uninterrupted)
    tracked = json.loads((run_dir / "wandb" / "tracking.json").read_text())
    assert tracked["last_step"] == NUM_STEPS - 1
    ids = {path.name.rsplit("-", 1)[1] for path in (run_dir / "wandb").glob("offline-run-*")}
    # without a checkpoint the run starts from its first weights again, in wandb as another run
    assert len(ids) == 1 or (len(ids) == 2 and "resuming" not in interrupted.output)
    assert ("1 finished step(s) are repeated" in interrupted.output) or not interrupted.during_save
    assert interrupted.left_behind == set()
    begins = [row["start_s"] for row in rows(run_dir / "events.jsonl")]
    assert max(begins) - min(begins) > 3600, "the clock has jumped"
    steps = rows(run_dir / "metrics.jsonl")
    assert all(value >= 0 for row in steps for name, value in row.items() if name.startswith("timing_s/"))


RESTARTS = ("trainer/restarts", "trainer/repeated_steps")


def assert_same_run(run_dir, calm):
    """Metrics, but for restarts, traces and the final policy are those of the other run, bit by bit."""
    found, expected = (
        [{k: v for k, v in row.items() if k not in RESTARTS} for row in metrics(path)] for path in (run_dir, calm)
    )
    assert [row["step"] for row in found] == list(range(NUM_STEPS))
    assert found == expected
    for step in range(NUM_STEPS):
        name = f"step-{step}.jsonl"
        assert rows(run_dir / "traces" / name) == rows(calm / "traces" / name), step
    whole, again = ((directory / "policy" / "model.safetensors").read_bytes() for directory in (calm, run_dir))
    assert whole == again


@pytest.mark.slow
def test_a_run_replaces_a_trainer_that_dies_or_loops_and_ends_as_if_nothing_had_happened(uninterrupted, trainer_lost):
    print(f"kill point drawn with seed {trainer_lost.seed}")
    run_dir, output = trainer_lost.run_dir, trainer_lost.output
    assert_same_run(run_dir, uninterrupted)
    last = metrics(run_dir)[-1]
    assert last["trainer/restarts"] == output.count("the trainer starts again from the newest checkpoint") == 2
    assert 1 <= last["trainer/repeated_steps"] <= 5, "a save under way does not count when a rank dies"
    assert "Traceback" not in output and trainer_lost.left_behind == set()
    named = re.findall(
        rf"rank\(s\) \[1\] of 2 made no progress for {PROGRESS_TIMEOUT_S} s \(`trainer.progress_timeout_s`\): "
        r"rank 1 on (\S+) at `train: micro batch \d of \d, forward` \((\w+)\)",
        output,
    )
    node = os.uname().nodename
    assert [(where, state == "stopped") for where, state in named] == [(node, False)]
    assert output.count(f"their stacks are in {run_dir / 'logs' / 'stacks'}") == 1
    stacks = sorted((run_dir / "logs" / "stacks" / node).iterdir())
    assert [path.name.rsplit("-", 1)[0] for path in stacks] == ["trainer-0", "trainer-1"]
    assert "in loop_for_ever" in stacks[1].read_text() and "in train" in stacks[0].read_text()


@pytest.mark.slow
def test_a_run_that_samples_ahead_stays_within_its_staleness_after_a_freeze_and_a_death_of_its_engine(ahead):
    steps = rows(ahead / "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(NUM_STEPS))
    assert [row["batch/responses"] for row in steps] == [16.0] * NUM_STEPS
    assert [row["batch/aborted_responses"] for row in steps] == [0.0] * NUM_STEPS
    # the first step is sampled under the newest weights, the others beside the training of the step before; groups that
    # begin again after a freeze in the middle of a publish are sampled under the new weights
    staleness = [row["batch/max_staleness"] for row in steps]
    assert staleness[0] == 0 and set(staleness) == {0, 1}
    assert all(0 <= row["rollout_corr/k3_kl"] < 0.02 for row in steps)
    sampled = [rows(ahead / "samples" / f"step-{step}.jsonl") for step in range(NUM_STEPS)]
    assert len({row["prompt_id"] for step in sampled for row in step}) == 4 * NUM_STEPS
    for step, responses in enumerate(sampled):
        for row in responses:
            versions = [version for version, _ in row["versions"]]
            assert versions == sorted(versions) and set(versions) <= {step - 1, step}
            assert sum(count for _, count in row["versions"]) == row["length"]
    assert steps[-1]["engine/reissued_groups"] <= 8
    assert [row["engine/restarts"] for row in steps] == [0, 1, 1, 2]
    assert [row["engine/hung"] for row in steps] == [0, 1, 1, 1]
    assert steps[-1]["publish/repeated"] >= 1
    assert steps[-1]["timing_s/publish"] < 60  # nobody waits for answers of the dead


@pytest.mark.slow
def test_an_int8_engine_fed_with_changes_over_sockets_stays_close_to_the_trainer_at_a_low_temperature(fed_with_changes):
    run_dir, output = fed_with_changes
    assert re.search(r"12 x \w*Int8", output) and "INT8: test products of" in output
    for row in rows(run_dir / "metrics.jsonl"):
        assert abs(row["rollout_corr/rollout_is_mean"] - 1) < 0.01
        assert 0 < row["rollout_corr/k3_kl"] <= 5e-3
        assert row["publish/sqnr_db_min"] > 30 and row["publish/weight_gap_max"] < 0.01
        # an untrained model may earn nothing and so learn nothing
        assert 0 <= row["publish/changed_share"] < 1
        assert 0 < row["publish/wire_bytes"] < 50_000 + 4e6 * row["publish/changed_share"]
        # it began with responses of another run to its own prompts, those of refills, too
        assert row["history/hit_rate"] == 1.0
        # a batch is short only if 8 groups hold fewer than 2 with signal
        num_trained = 2 - row["refill/missing_groups"]
        assert row["batch/groups"] == num_trained + row["refill/groups_without_signal"]
        assert row["batch/groups"] == 8 or num_trained == 2
        assert (row["actor/optimizer_steps"], row["batch/trained_responses"]) == (num_trained, 4 * num_trained)
    assert sum(row["refill/groups_without_signal"] for row in rows(run_dir / "metrics.jsonl")) > 0
    evaluations = {(row["format"], row["step"]) for row in rows(run_dir / "evaluation.jsonl")}
    assert evaluations == {("int8", 0), ("int8", 2), ("bf16", 0), ("bf16", 2)}


@pytest.mark.slow
def test_a_checkpoint_exports_and_evaluates(example, uninterrupted, evaluated):
    weights = "model.safetensors"
    assert evaluated.weights.read_bytes() == (uninterrupted / "policy" / weights).read_bytes()
    assert evaluated.weights.read_bytes() != (example / EXPERTS / weights).read_bytes()
    by_set = {row["set_name"]: row for row in evaluated.rows}
    assert (by_set["greedy"]["num_prompts"], by_set["greedy"]["samples_per_prompt"]) == (16, 1)
    assert (by_set["sampled"]["num_prompts"], by_set["sampled"]["samples_per_prompt"]) == (8, 3)
    assert all(0 <= row["average"] <= row["passed"] <= 1 and row["format"] == "bf16" for row in by_set.values())
    assert "avg@3" in evaluated.output


@pytest.mark.slow
def test_a_warm_start_lowers_its_loss(warm_start):
    assert len(warm_start) == 8
    assert warm_start[-1] < 0.8 * warm_start[0]
