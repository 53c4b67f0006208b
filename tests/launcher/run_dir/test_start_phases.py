"""Seconds from submission to the first step, from records whose times are known."""

from pathlib import Path

from launcher.run_dir.start_phases import Phase, StartPhases, phase_lines, read_phases
from launcher.run_dir.status import Now


def now(actor: str, phase: str, since_s: float, step: int = 4) -> Now:
    return Now(phase=phase, actor=actor, step=step, num_steps=9, since_s=since_s)


def test_phases_of_the_batch_script_and_of_the_run_are_listed_once_after_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "phases").write_text("100 submission\n103.5 node checks\n")
    start = StartPhases(phases=read_phases(tmp_path / "phases"))
    old = now("", "ended", 90.0)
    statuses = [None, old, *[now("controller", "start Ray", 110.0)] * 2, now("engines", "rollout", 120.0)]
    assert [start.follow(status, first_step=4) for status in statuses] == [[]] * 5
    assert start.follow(now("trainer", "checkpoint", 150.0, step=5), first_step=4) == [
        "from submission to the end of the first step: 50.0 s",
        "  submission                      3.5 s",
        "  node checks                     6.5 s",
        "  controller: start Ray          10.0 s",
        "  engines: rollout               30.0 s",
    ]
    assert start.follow(now("engines", "rollout", 151.0, step=5), first_step=4) == []


def test_a_script_without_phases_starts_with_the_run(tmp_path: Path) -> None:
    assert read_phases(tmp_path / "phases") == []
    assert phase_lines([Phase(name="controller: start Ray", begin_s=1.0)], end_s=3.0)[0].endswith("first step: 2.0 s")
