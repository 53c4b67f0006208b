"""Limit and kills of a SLURM job stand above the group of its processes, in both versions of control groups."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from launcher.cluster.memory_limit import memory_kills, memory_limit_left

GIB = 1 << 30
V2 = "slurmstepd.scope/job_7/step_0/task_0"
V1 = "slurm/uid_5/job_7/step_0"


def write(group: Path, **values: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (group / f"memory.{name}").write_text(f"{value}\n")


def job_of_version_2(root: Path, limit: str, stat: str = "anon 5\ninactive_file 0") -> None:
    """A job that has used 4 GiB; its task has no limit of its own."""
    write(root / "slurmstepd.scope" / "job_7", max=limit, current=str(4 * GIB), stat=stat)
    write(root / V2, max="max", current=str(GIB), stat="anon 5")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "cgroup"
    path.write_text(f"0::/{V2}\n")
    return path


def test_the_jobs_limit_counts_for_its_tasks(own: Path, tmp_path: Path) -> None:
    job_of_version_2(tmp_path, str(10 * GIB))
    assert memory_limit_left(own, tmp_path) == 6 * GIB


def test_pages_of_files_are_free(own: Path, tmp_path: Path) -> None:
    job_of_version_2(tmp_path, str(10 * GIB), f"inactive_file {2 * GIB}\nactive_file {GIB}\nshmem {GIB}")
    assert memory_limit_left(own, tmp_path) == 9 * GIB


def test_the_nearest_of_several_limits_counts(own: Path, tmp_path: Path) -> None:
    job_of_version_2(tmp_path, str(10 * GIB))
    write(tmp_path / V2, max=str(2 * GIB), current=str(GIB), stat="")
    assert memory_limit_left(own, tmp_path) == GIB


def test_without_limits_nothing_is_limited(own: Path, tmp_path: Path) -> None:
    assert memory_limit_left(own, tmp_path) == sys.maxsize, "groups that cannot be read"
    job_of_version_2(tmp_path, "max")
    assert memory_limit_left(own, tmp_path) == sys.maxsize
    assert memory_limit_left(tmp_path / "none", tmp_path) == sys.maxsize


def test_version_1_has_a_folder_for_memory(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"9:cpu,cpuacct:/elsewhere\n4:memory:/{V1}\n0::/\n")
    job = tmp_path / "memory" / "slurm" / "uid_5" / "job_7"
    write(job, limit_in_bytes=str(8 * GIB), usage_in_bytes=str(3 * GIB), stat=f"total_inactive_file {GIB}")
    assert memory_limit_left(own, tmp_path) == 6 * GIB


def test_a_container_finds_its_own_group_at_the_root(own: Path, tmp_path: Path) -> None:
    write(tmp_path, max=str(3 * GIB), current=str(GIB), stat="")
    assert memory_limit_left(own, tmp_path) == 2 * GIB


OTHERS = "oom 9\noom_kill 9"
"""Kills of other jobs and users."""


def test_kills_in_other_steps_of_the_job_count_and_those_of_other_jobs_do_not(own: Path, tmp_path: Path) -> None:
    write(tmp_path / V2, events="oom 0\noom_kill 0")
    write(tmp_path / "slurmstepd.scope" / "job_7", events="oom 2\noom_kill 2")
    write(tmp_path / "slurmstepd.scope", events=OTHERS)
    assert memory_kills(own, tmp_path) == 2


def test_outside_a_job_the_own_group_counts(own: Path, tmp_path: Path) -> None:
    own.write_text("0::/user.slice/session-3.scope\n")
    write(tmp_path / "user.slice", events=OTHERS)
    write(tmp_path / "user.slice" / "session-3.scope", events="oom_kill 1")
    assert memory_kills(own, tmp_path) == 1


def test_a_container_counts_kills_at_the_root(own: Path, tmp_path: Path) -> None:
    write(tmp_path, events="oom_kill 3")
    assert memory_kills(own, tmp_path) == 3


def test_groups_of_version_1_are_counted_one_by_one(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"4:memory:/{V1}\n0::/\n")
    job = tmp_path / "memory" / "slurm" / "uid_5" / "job_7"
    for group, kills in ((job, 0), (job / "step_0", 1), (job / "step_1", 2), (job.parent, 9)):
        write(group, oom_control=f"under_oom 0\noom_kill {kills}")
    assert memory_kills(own, tmp_path) == 3


def test_kills_of_a_machine_without_groups_are_not_counted(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    assert memory_kills(own, tmp_path) == 0, "no list of groups"
    own.write_text("4:memory:/\n0::/\n")
    assert memory_kills(own, tmp_path) == 0, "version 2 has no counter there"
    write(tmp_path / "memory", oom_control=OTHERS)
    (tmp_path / "memory" / "release_agent").touch()
    assert memory_kills(own, tmp_path) == 0


def test_a_step_that_ends_meanwhile_ends_no_run(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write_text("4:memory:/slurm/uid_5/job_7/step_0\n")
    job = tmp_path / "memory" / "slurm" / "uid_5" / "job_7"
    for step in ("step_0", "step_1"):
        write(job / step, oom_control="oom_kill_disable 0\noom_kill 1")
    write(job, oom_control="oom_kill 1")
    islink = os.path.islink

    def ends(path: str) -> bool:
        """`os.walk` asks before it goes into a folder that it has listed."""
        if path.endswith("step_1"):
            shutil.rmtree(path)
        return islink(path)

    monkeypatch.setattr(os.path, "islink", ends)
    assert memory_kills(own, tmp_path) == 2
    assert not (job / "step_1").exists()
