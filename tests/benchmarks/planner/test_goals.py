"""Goals of speed name the staleness of their scheme, and systems are compared at equal staleness."""

from benchmarks.harness.record import Row
from benchmarks.planner.goals import GOALS, OURS, PAPER, WITH_DRAFTS, goals
from benchmarks.planner.schedules import CORRELATIONS, JUDGED_CORRELATION, PROMPT_SHARE, SCHEMES

SPEEDS = {
    ("static", "none"): 1.0,
    (PAPER, "none"): 1.5,
    (PAPER, "histospec"): 2.0,
    (OURS, "none"): 1.6,
    (OURS, "ours"): 3.0,
    ("adaptive, overlap 2", "ours"): 4.0,
    ("adaptive, overlap 1, head start .2", "ours"): 3.5,
}
"""Over `static` without drafts; all other schemes have twice its speed."""


def rows() -> list[Row]:
    """One row for each scheme, drafter and forecast, on 64 engines."""
    forecasts = [("groups", PROMPT_SHARE), *(("responses", correlation) for correlation in CORRELATIONS)]
    found: list[Row] = [
        {
            "what": "schedule",
            "scheme": scheme,
            "seed": 1,
            "engines": 64,
            "forecasts": kind,
            "correlation": correlation,
            "drafts": drafts,
            "trainer_gpus": 0,
            "colocated": False,
            "step_s": 60 / SPEEDS.get((scheme, drafts), 2.0),
            "bubble": 0.1,
            "mean_staleness": 0.2,
        }
        for scheme in SCHEMES
        for kind, correlation in forecasts
        for drafts in ("none", "ours", "histospec")
    ]
    return [*found, {"what": "planning", "scheme": "static", "ms": 1.0}]


def test_a_goal_of_speed_names_the_staleness_of_its_scheme() -> None:
    names = [goal.name for goal in goals(rows()) if goal.unit == "x"]
    for scheme in GOALS:
        staleness = f"{scheme} (staleness up to {SCHEMES[scheme].max_staleness}) over static"
        assert any(name.startswith(staleness) for name in names)
    assert [name for name in names if "staleness" not in name] == []


def test_with_drafts_the_goal_names_the_largest_staleness_of_its_schemes() -> None:
    found = {goal.name: goal.value for goal in goals(rows())}
    assert max(SCHEMES[scheme].max_staleness for scheme in WITH_DRAFTS) == 2
    for name in ("groups at 0.71", f"responses at {JUDGED_CORRELATION}"):
        assert found[f"with drafts (staleness up to 2) over static without drafts, {name}"] == 4.0


def test_the_stack_of_the_paper_is_compared_at_its_own_staleness() -> None:
    assert SCHEMES[OURS].max_staleness == SCHEMES[PAPER].max_staleness == 1
    found = {goal.name: goal.value for goal in goals(rows())}
    for name in ("groups at 0.71", f"responses at {JUDGED_CORRELATION}"):
        assert found[f"with drafts, {name}: over the paper's stack, both at staleness 1"] == 1.5
