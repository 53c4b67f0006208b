import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import RunDirectoryError
from launcher.run_dir.status import QUIET_S, StatusFile, read_now, status_lines
from launcher.run_dir.stop_request import write_request
from tests.support.deadline import DEADLINE_S

ORIGIN_S = 1.7e9


def write_steps(run_dir: Path, num_steps: int) -> None:
    rows = [
        {"step": step, "timing_s/step": 40.0, "timing_s/rollout": 30.0, "perf/response_tokens": 40 * 1234.0}
        for step in range(num_steps)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_status_says_phase_step_rates_checkpoint_and_request(tmp_path: Path) -> None:
    status = StatusFile(run_dir=tmp_path, num_steps=10, step=2)
    status.finished(2)
    status.phase("engines", "rollout")
    write_steps(tmp_path, 3)
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("2\n")
    write_request(tmp_path, reason="megatron-rl stop")
    first, second, *rest = status_lines(tmp_path, now_s=time.time() + 30)
    assert first == "step 4 of 10: rollout for 30 s (all wait for engines)"
    assert second.startswith("running on ") and second.endswith("last record 30 s ago")
    assert rest == [
        "last 3 step(s): 40.0 s each (rollout 30.0)",
        "tokens/s 1234, 7 steps to go, about 5 min",
        "checkpoint: step 2",
        "stop requested 30 s ago: megatron-rl stop",
    ]


def test_time_left_counts_evaluations_and_checkpoints_and_the_token_rate_is_of_all_tokens(tmp_path: Path) -> None:
    """An evaluation of 600 s before every fifth step, whose rollout begins within it, and a checkpoint before each.

    SLURM has suspended the job for a night in one step.
    """
    StatusFile(run_dir=tmp_path, num_steps=110, step=10).phase("engines", "rollout")
    rows = [
        {
            "step": step,
            "timing_s/step": step_s,
            "timing_s/train": 90.0,
            "timeline/elapsed_s": step_s + 60 + (600 if step % 5 == 2 else 0) + (36000 if step == 7 else 0),
            **({"timing_s/suspended": 36000.0} if step == 7 else {}),
            "perf/response_tokens": 1.2e6,
            "perf/throughput_tokens_s": 1.2e6 / step_s,
        }
        for step in range(10)
        for step_s in [100.0 if step % 5 == 2 else 300.0]
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps, rates, *_ = status_lines(tmp_path, now_s=time.time())[2:]
    # five steps take 4 x 300 + 100 s, their checkpoints 300 s and their evaluation 600 s: 100 steps take 44,000 s
    assert steps == "last 5 step(s): 260.0 s each (train 90.0)"
    # 5 x 1.2e6 tokens in 1300 s; the mean of the five rates is 5600
    assert rates == "tokens/s 4615, 100 steps to go, about 12 h 13 min with 3 min between steps"


def test_the_newest_step_stays_when_the_run_returns_to_a_checkpoint(tmp_path: Path) -> None:
    status = StatusFile(run_dir=tmp_path, num_steps=10, step=4)
    assert status.newest_step == 4, "steps of an earlier start"
    for step in (4, 5, 6):
        status.finished(step)
    status.step = 5
    status.finished(5)
    assert (status.step, status.newest_step) == (6, 7)


def test_a_long_phase_reports_its_groups_and_a_silent_run_is_called_so(tmp_path: Path) -> None:
    status = StatusFile(run_dir=tmp_path, num_steps=10)
    status.phase("engines", "rollout")
    status.progress(1, 64)
    now = read_now(tmp_path)
    assert now is not None and now.total == 0, "progress is written every few seconds only"
    status._now = status._now and type(status._now)(**{**_fields(status._now), "written_s": 0.0})
    status.progress(2, 64)
    first, second, *_ = status_lines(tmp_path, now_s=time.time() + 1200)
    assert ", 2 of 64 groups (all wait for engines)" in first
    assert "the run may be gone" in second


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock, which only the test advances."""
    now_s = [ORIGIN_S]
    monkeypatch.setattr("launcher.run_dir.status.time.time", lambda: now_s[0])
    return now_s


def test_a_run_that_lives_is_not_called_gone_in_a_long_phase_and_a_killed_one_is(
    tmp_path: Path, clock: list[float]
) -> None:
    """Training of a large model counts no groups; its phase and its last record show how long it has taken."""
    status = StatusFile(run_dir=tmp_path, num_steps=300, step=12)
    status.alive()
    assert read_now(tmp_path) is None, "no phase has begun"
    status.phase("trainer", "train")
    clock[0] += 1440
    status.alive()
    first, second, *_ = status_lines(tmp_path, now_s=clock[0] + 9)
    assert first == "step 13 of 300: train for 24 min (all wait for trainer)"
    assert second.endswith(", alive 9 s ago, last record 24 min ago")
    _, second, *_ = status_lines(tmp_path, now_s=clock[0] + QUIET_S + 1)
    assert second.endswith(", alive 5 min ago, last record 29 min ago; the run may be gone")


def test_a_thread_writes_that_the_run_lives_until_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.run_dir.status.ALIVE_EVERY_S", 0.001)
    status = StatusFile(run_dir=tmp_path, num_steps=3)
    with status.until_the_end():
        status.phase("trainer", "train")
        status.part("update")
        begun = read_now(tmp_path)
        assert begun is not None
        deadline_s = time.monotonic() + DEADLINE_S
        while (now := read_now(tmp_path)) is None or not now.alive_s > begun.alive_s:
            assert time.monotonic() < deadline_s
        assert replace(now, alive_s=begun.alive_s) == begun, "a thread does not know whether the run gets on"
        assert "status" in {thread.name for thread in threading.enumerate()}
    assert "status" not in {thread.name for thread in threading.enumerate()}
    now = read_now(tmp_path)
    assert now is not None and now.phase == "ended"


def test_a_record_of_a_version_without_signs_of_life_is_read(tmp_path: Path, clock: list[float]) -> None:
    StatusFile(run_dir=tmp_path, num_steps=3).phase("trainer", "train")
    record = json.loads((tmp_path / "status.json").read_text())
    del record["alive_s"]
    (tmp_path / "status.json").write_text(json.dumps(record))
    assert status_lines(tmp_path, now_s=clock[0] + 60)[1].endswith(", alive 60 s ago, last record 60 s ago")


def test_what_follows_a_finished_step_is_called_with_it(tmp_path: Path) -> None:
    seen: list[int] = []
    status = StatusFile(run_dir=tmp_path, num_steps=3, on_finished=lambda: seen.append(status.step))
    status.finished(0)
    status.finished(1)
    assert seen == [1, 2]


def test_the_part_of_a_phase_is_shown_until_the_next_phase(tmp_path: Path) -> None:
    status = StatusFile(run_dir=tmp_path, num_steps=10)
    status.part("check")
    assert read_now(tmp_path) is None, "no phase has begun"
    status.phase("publisher", "publish")
    status.part("check")
    status.part("prove")
    assert (
        status_lines(tmp_path, now_s=time.time() + 3)[0]
        == "step 1 of 10: publish (prove) for 3 s (all wait for publisher)"
    )
    status.phase("engines", "rollout")
    now = read_now(tmp_path)
    assert now is not None and now.part == ""


def test_progress_is_written_although_the_clock_was_set_back(tmp_path: Path) -> None:
    status = StatusFile(run_dir=tmp_path, num_steps=10)
    status.phase("engines", "rollout")
    status._now = status._now and type(status._now)(**{**_fields(status._now), "written_s": time.time() + 3600})
    status.progress(2, 64)
    now = read_now(tmp_path)
    assert now is not None and now.done == 2


def _fields(now: object) -> dict[str, object]:
    return {name: getattr(now, name) for name in now.__slots__}


def test_an_ended_run_says_so_also_after_an_error(tmp_path: Path) -> None:
    status = StatusFile(run_dir=tmp_path, num_steps=10, step=4)
    with pytest.raises(KeyError), status.until_the_end():
        raise KeyError
    assert status_lines(tmp_path, now_s=time.time() + 60)[0].startswith("ended 60 s ago on ")
    assert status_lines(tmp_path, now_s=time.time())[0].endswith("4 of 10 steps")


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    StatusFile(run_dir=tmp_path / "absent", num_steps=10).phase("engines", "rollout")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        status_lines(tmp_path, now_s=0.0)


def test_a_status_that_holds_none_is_an_error_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("")
    with pytest.raises(RunDirectoryError, match="holds no status"):
        status_lines(tmp_path, now_s=0.0)


def test_a_newest_checkpoint_that_is_gone_is_said_beside_all_else(tmp_path: Path) -> None:
    StatusFile(run_dir=tmp_path, num_steps=10).phase("engines", "rollout")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("2\n")
    *others, last = status_lines(tmp_path, now_s=time.time())
    assert others[0].startswith("step 1 of 10: rollout") and last.startswith("checkpoint: ")
    assert "latest names step 2" in last
