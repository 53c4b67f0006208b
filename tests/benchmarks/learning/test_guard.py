"""The cases of the guard's benchmark are runs, and its goals say what it must show."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.example_run import k3_parts
from benchmarks.learning.guard import CASES, HEALTHY, HEALTHY_KEYS, format_changes, goals
from launcher.checks.combinations import run_combinations
from launcher.config.loading import load
from launcher.config.schema import RunConfig


@pytest.mark.parametrize("case", [*CASES, HEALTHY])
def test_every_case_is_a_valid_configuration(case: str) -> None:
    config = load(RunConfig, "examples/arithmetic/rl.yaml", CASES.get(case, HEALTHY_KEYS))
    assert run_combinations(config) == []
    assert (config.algorithm.guard.mode == "act") == (case in ("3 bits, act", HEALTHY))
    assert (config.algorithm.correction.mode == "none") == (case != HEALTHY)


def test_the_control_must_lose_accuracy_which_the_guard_brings_back_and_a_healthy_run_has_no_action() -> None:
    after = {"bf16, off": 0.9, "3 bits, off": 0.8, "3 bits, advise": 0.8, "3 bits, act": 0.89, HEALTHY: 0.9}
    rows = [
        {"seed": seed, "case": case, "held_out_after": value, "actions": 0.0}
        for seed in (1, 2)
        for case, value in after.items()
    ]
    assert [(goal.name, round(goal.value, 6), goal.met) for goal in goals(rows)] == [
        ("3 bits, off: below bf16, held-out, lower end over seeds", 10.0, True),
        ("3 bits, act: below bf16, held-out, upper end over seeds", 1.0, True),
        ("actions in a healthy run", 0.0, True),
    ]
    assert not goals([{**row, "actions": 1.0} for row in rows])[2].met


def test_starts_of_engines_are_counted_from_the_runs_events(tmp_path: Path) -> None:
    lines = (
        "step 2, level 1 of 3: set 1 layer(s) with the worst SQNR in BF16: 0; ESS ..",
        "step 3, level 2 of 3: advise engine.format = engine.kv_format = bf16; ESS ..",
        "step 4, level 3 of 3: set engine.format = engine.kv_format = bf16; ESS ..",
        "step 5, level 3 of 3: set correction.cap = 1.5; ESS ..",
    )
    rows = [json.dumps({"actor": "guard", "activity": line, "start_s": 0, "end_s": 0}) + "\n" for line in lines]
    (tmp_path / "events.jsonl").write_text("".join(rows))
    assert format_changes(tmp_path) == 2


def test_parts_of_k3_are_means_over_the_steps_that_measured_them() -> None:
    name = "rollout_corr/part_k3/"
    metrics = [{f"{name}total": 0.3, f"{name}quantisation": 0.2}, {}, {f"{name}total": 0.5, f"{name}quantisation": 0.4}]
    parts = k3_parts(metrics)
    assert parts.pop("k3_total") == pytest.approx(0.4) and parts.pop("k3_quantisation") == pytest.approx(0.3)
    assert parts == {"k3_numerics": 0.0, "k3_speculation": 0.0, "k3_interaction": 0.0}
    assert set(k3_parts([{}]).values()) == {0.0}
