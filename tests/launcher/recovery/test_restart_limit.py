from pathlib import Path

from launcher.recovery.restart_limit import WINDOW_STEPS, RestartLimit

ROOT = Path(__file__).parents[3]


def test_a_restart_counts_until_so_many_more_steps_are_finished() -> None:
    newest = 7
    limit = RestartLimit(max_restarts=3, newest_step=lambda: newest)
    limit.note()
    limit.note()
    newest += WINDOW_STEPS - 1
    limit.note()
    assert (limit.num_counted, limit.num_restarts) == (3, 3)
    newest += 1
    assert (limit.num_counted, limit.num_restarts) == (1, 3)


def test_the_documentation_names_the_number_of_steps() -> None:
    for page in ("configuration.md", "faults.md", "planning.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert f"within the last {WINDOW_STEPS} finished steps" in " ".join(text.split()), page
