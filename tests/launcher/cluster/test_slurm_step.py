"""The step of a process, from SLURM's variables alone."""

import socket

import pytest

from launcher.cluster.slurm_step import SlurmStep, beside_allocation, host_names, in_allocation
from launcher.errors import LaunchError


def of_second_task(monkeypatch: pytest.MonkeyPatch, **more: str) -> SlurmStep:
    given = {"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    for name, value in (given | {"SLURM_STEP_NODELIST": "n[1-2]"} | more).items():
        monkeypatch.setenv(name, value)
    return SlurmStep.of_this_process("n2")


def test_the_nodes_of_a_step_need_no_command_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    step = of_second_task(monkeypatch)
    assert (step.nodes, step.num_tasks, step.job_id, step.is_first) == (("n1", "n2"), 2, 123, False)


def test_a_requeued_job_has_steps_of_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM keeps the number of the job, and counts its steps from 0 again."""
    first = of_second_task(monkeypatch).name
    second = of_second_task(monkeypatch, SLURM_RESTART_COUNT="1").name
    batch_scripts = {"123.0", "123.1"}
    assert (first, second) == ("123.0.0", "123.1.0") and not batch_scripts & {first, second}


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1 n2"),
        ("a[1-3,07],b", "a1 a2 a3 a07 b"),
        ("n[098-102],m[9-11]", "n098 n099 n100 n101 n102 m9 m10 m11"),
        ("r[1-2]n[08-11]", "r1n08 r1n09 r1n10 r1n11 r2n08 r2n09 r2n10 r2n11"),
        ("n1.cluster.org,r-2_[0-1]", "n1.cluster.org r-2_0 r-2_1"),
        ("b,a", "b a"),
    ],
)
def test_host_lists_are_read_as_slurm_reads_them(listed: str, names: str) -> None:
    """The names are those that `scontrol show hostnames` of SLURM 22.05 prints."""
    assert " ".join(host_names(listed)) == names


@pytest.mark.parametrize("listed", ["n[1-2", "n[]", "n[a-b]", "n[1-2]]", "a[1-2,]", "a,,b", "n[1-2] m"])
def test_what_is_no_host_list_is_refused(listed: str) -> None:
    with pytest.raises(LaunchError, match=r"SLURM_STEP_NODELIST = .* is no host list"):
        host_names(listed)


@pytest.mark.parametrize(
    ("variables", "host", "inside", "beside"),
    [
        ({"_JOB_ID": "7", "_JOB_NODELIST": "gpu[05-08]"}, "gpu07", True, False),
        ({"_JOB_ID": "7", "_JOB_NODELIST": "gpu[05-08]"}, "gpu07.cluster.site", True, False),
        ({"_JOB_ID": "7", "_JOB_NODELIST": "gpu[05-08]"}, "login1", False, True),  # a shell of `salloc`
        ({"_JOB_ID": "7", "_JOB_NODELIST": "gpu[05-08]", "D_NODENAME": "gpu07"}, "a-container", True, False),
        ({"_JOB_ID": "7", "_JOB_NODELIST": "gpu[05-08]", "_PROCID": "0"}, "a-container", True, False),
        ({"_JOB_ID": "7", "_JOB_NODELIST": "a1", "_STEP_NODELIST": "b1", "D_NODENAME": "b1"}, "b1", True, False),
        ({"_JOB_ID": "7"}, "gpu07", True, False),
        ({}, "gpu07", False, False),
        ({"_JOB_NODELIST": "gpu[05-08]"}, "gpu07", False, False),
    ],
)
def test_a_node_of_the_job_is_one_of_slurms_list(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: str, inside: bool, beside: bool
) -> None:
    for name in ("_JOB_ID", "_JOB_NODELIST", "_STEP_NODELIST", "_PROCID", "D_NODENAME"):
        monkeypatch.delenv(f"SLURM{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM{name}", value)
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert (in_allocation(), beside_allocation()) == (inside, beside)


def test_an_error_names_the_variable_that_is_no_host_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[05-08")
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST = 'gpu"):
        in_allocation()
