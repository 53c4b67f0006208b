from launcher.metrics.panels import DASHBOARD
from launcher.metrics.registry import find


def test_every_panel_shows_listed_metrics_of_one_unit() -> None:
    for panels in DASHBOARD.values():
        for panel in panels:
            listed = [find(name) for name in panel.metrics]
            assert None not in listed, panel
            assert len({metric.unit for metric in listed if metric is not None}) == 1, panel


def test_the_dashboard_has_a_section_for_each_question() -> None:
    assert list(DASHBOARD) == [
        "Learning",
        "Mismatch",
        "Rollout speed and drafts",
        "Planner and staleness",
        "Publish",
        "Where time went",
        "Faults",
    ]
