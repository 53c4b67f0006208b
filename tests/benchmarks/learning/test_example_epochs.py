"""Curves of runs with and without drafts are compared seed by seed."""

from pathlib import Path

import pytest

from benchmarks.harness.record import Row
from benchmarks.learning import example_epochs
from benchmarks.learning.example_epochs import goals, main, warm_start

FEWER, REWARD, HELD_OUT = (
    "tokens per forward after epoch 0",
    "reward: drafts below none, upper end over seeds",
    "held-out accuracy: drafts below none, upper end over seeds",
)


def runs(*, lift: float = 0.0, tokens_per_forward: float = 2.0) -> list[Row]:
    """Three seeds of two epochs; with drafts every value is higher by `lift` +- 0.01."""
    return [
        {
            "seed": seed,
            "drafts": drafts,
            "epoch": epoch,
            "reward": 0.3 + 0.2 * epoch + 0.1 * seed + (lift + noise if drafts else 0.0),
            "held_out_after": 0.9 + (lift + noise if drafts else 0.0),
            "tokens_per_forward": tokens_per_forward if drafts and epoch else 1.0,
        }
        for seed, noise in ((1, 0.01), (2, -0.012), (3, 0.005))
        for drafts in (True, False)
        for epoch in (0, 1)
    ]


def met(rows: list[Row]) -> dict[str, bool]:
    return {goal.name: goal.met for goal in goals(rows)}


def test_small_differences_do_not_count() -> None:
    found = {goal.name: goal for goal in goals(runs())}
    assert {name: goal.met for name, goal in found.items()} == {FEWER: True, REWARD: True, HELD_OUT: True}
    # by hand: differences 1, -1.2 and 0.5 points; mean 0.1, standard error 0.666, and 4.3 of these below it
    assert found[REWARD].value == pytest.approx(-0.1 + 4.3 * 0.6658, abs=0.001)


def test_a_loss_of_every_seed_counts() -> None:
    found = met(runs(lift=-0.05))
    assert not found[REWARD] and not found[HELD_OUT]


def test_equal_runs_cost_nothing() -> None:
    """Drafts change no sampled token where an engine's kernels do not depend on the number of rows."""
    equal = [{**row, "reward": 0.3, "held_out_after": 0.9} for row in runs()]
    assert [goal.value for goal in goals(equal) if goal.name != FEWER] == [0, 0]


def test_one_token_per_forward_saves_nothing() -> None:
    assert not met(runs(tokens_per_forward=1.0))[FEWER]


def test_one_seed_has_no_spread(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--json", "unused", "--seeds", "1"])
    assert "--seeds 1: differences need 2 to 10" in capsys.readouterr().err


def test_a_whole_warm_start_is_kept_on_resume_and_a_quick_one_never_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(command: list[str], *, check: bool) -> None:
        made.append(" ".join(command))

    monkeypatch.setattr(example_epochs.subprocess, "run", make)
    work = tmp_path / "warm"
    assert warm_start(work, quick=False, resume=True) == work and len(made) == 3, "there is none yet"
    (work / "warm").mkdir(parents=True)
    (work / "warm" / "config.json").touch()
    assert warm_start(work, quick=False, resume=True) == work and len(made) == 3, "it is kept"
    quick = warm_start(work, quick=True, resume=True)
    assert quick != work and len(made) == 6 and all(str(quick) in line for line in made[3:])
    assert warm_start(work, quick=False) == work and len(made) == 9, "made anew without resume"


def test_an_epoch_without_a_draft_has_no_acceptance_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps record a mean only if they have something to count."""
    always = {"reward/mean": 0.5, "response_length/mean": 9.0, "timing_s/rollout": 1.0, "history/drafted_tokens": 0.0}
    steps = [{**always, "history/tokens_per_forward": 1.0}, {**always, "history/acceptance_rate": 0.75}]
    monkeypatch.setattr(example_epochs, "few_prompts", lambda warm, path, number: path)
    monkeypatch.setattr(example_epochs, "watch", lambda command, *, log: (0, None, None))
    monkeypatch.setattr(example_epochs, "held_out_accuracy", lambda run_dir: (0.1, 0.2))
    monkeypatch.setattr(example_epochs, "read_metrics", lambda run_dir: steps)
    first, second = example_epochs.run(tmp_path, tmp_path / "work", seed=1, drafts=True, quick=True)
    assert "acceptance_rate" not in first and first["tokens_per_forward"] == 1.0
    assert "tokens_per_forward" not in second and second["acceptance_rate"] == 0.75
