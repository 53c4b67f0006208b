"""A SLURM step that a person starts: one task on each node, and the configuration of its nodes."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.cluster.job_folder import VARIABLE, JobFolder
from launcher.cluster.node import NodeResources, node_resources, package_versions
from launcher.cluster.slurm_step import SlurmStep, has_several_tasks
from launcher.commands import srun_run
from launcher.commands.job_checks import LOCK_TIMEOUT_S, refuse_in_use
from launcher.commands.srun_run import _config_of_step
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError, LaunchError, RunDirectoryError
from launcher.run_dir.run_lock import RunLock
from launcher.run_dir.stop_request import read_request, write_request

STEP = SlurmStep(nodes=("node1", "node2"), num_tasks=2, job_id=7, name="7.0.0", is_first=True)


@pytest.fixture
def config(write_config: Callable[[str], Path]) -> RunConfig:
    return load(RunConfig, write_config(""))


def test_the_run_joins_the_ray_cluster_of_the_steps_nodes(config: RunConfig) -> None:
    cluster = _config_of_step(config, STEP, num_gpus=0).cluster
    assert (cluster.address, cluster.min_nodes, cluster.slurm.nodes, cluster.slurm.spares) == ("auto", 2, 2, 0)


def test_several_tasks_on_a_node_are_refused_with_the_command(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"4 tasks on 2 node\(s\); .*srun --ntasks-per-node=1 megatron-rl run"):
        _config_of_step(config, replace(STEP, num_tasks=4), num_gpus=0)


def test_a_step_with_other_nodes_than_configured_is_refused(config: RunConfig) -> None:
    slurm = config.cluster.slurm.model_copy(update={"nodes": 4})
    other = config.model_copy(update={"cluster": config.cluster.model_copy(update={"slurm": slurm})})
    with pytest.raises(ConfigError, match=r"`cluster\.slurm\.nodes` = 4, but the SLURM step has 2 nodes"):
        _config_of_step(other, STEP, num_gpus=0)


@pytest.mark.parametrize(("configured", "expected"), [(0, 8), (4, 4)])
def test_the_nodes_own_gpus_count_unless_their_number_is_configured(
    config: RunConfig, configured: int, expected: int
) -> None:
    slurm = config.cluster.slurm.model_copy(update={"gpus_per_node": configured})
    given = config.model_copy(update={"cluster": config.cluster.model_copy(update={"slurm": slurm})})
    assert _config_of_step(given, STEP, num_gpus=8).cluster.slurm.gpus_per_node == expected


def test_all_tasks_read_the_configuration_of_the_first(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that sees another number of GPUs than the first is then judged by the plan's number."""
    for variable in (VARIABLE, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(variable, "")  # restored afterwards
    seen: list[int] = []

    def note(config: RunConfig, folder: JobFolder) -> int:
        seen.append(config.cluster.slurm.gpus_per_node)
        return 0

    for part in ("check", "reduce", "node"):
        monkeypatch.setattr(srun_run, part, note)
    monkeypatch.setattr(SlurmStep, "of_this_process", lambda node: replace(STEP, is_first=False))
    path = tmp_path / "run" / "slurm" / STEP.name
    folder = JobFolder(path=path, config=path / "config.yaml")
    config = config.model_copy(update={"run_dir": str(tmp_path / "run")})
    srun_run._write_files(_config_of_step(config, STEP, num_gpus=8), folder, STEP)
    (path / "nodes").write_text("node1\nnode2\n")
    assert srun_run.run_as_task(config) == 0
    assert seen == [8, 8, 8]


def test_a_refused_run_ends_the_other_tasks_at_once(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise ConfigError("too little memory")

    monkeypatch.setattr(srun_run, "check_run", refuse)
    for variable in (VARIABLE, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(variable, "")  # restored afterwards
    monkeypatch.setattr(SlurmStep, "of_this_process", lambda node: STEP)
    with pytest.raises(ConfigError, match="too little memory"):
        srun_run.run_as_task(config)
    monkeypatch.setattr(SlurmStep, "of_this_process", lambda node: replace(STEP, is_first=False))
    assert srun_run.run_as_task(config) == 0


def test_packages_for_cpus_on_a_node_with_gpus_are_refused(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus = NodeResources(cpu_cores=64, available_bytes=1 << 40, gpu_bytes=(80 << 30,) * 8)
    monkeypatch.setattr(srun_run, "package_versions", lambda: {"torch": "2.13.0+cpu"})
    folder = JobFolder(path=tmp_path / "step", config=tmp_path / "step" / "run.yaml")
    with pytest.raises(ConfigError, match=r"this machine has 8 GPU\(s\), but torch 2\.13\.0\+cpu of this environment"):
        srun_run._first(_config_of_step(config, STEP, num_gpus=8), folder, STEP, with_gpus)
    assert not folder.path.exists()


def test_a_step_changes_no_file_that_a_waiting_job_reads(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "run" / "slurm" / STEP.name
    srun_run._write_files(config, JobFolder(path=path, config=path / "config.yaml"), STEP)
    assert load(RunConfig, path / "config.yaml") == config
    assert json.loads((path / "packages.json").read_text()) == package_versions()
    assert [each.name for each in path.parent.iterdir()] == [STEP.name]


def test_a_step_on_a_run_directory_in_use_is_refused_before_it_writes_a_file(config: RunConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_request(run_dir, reason="for the run that goes on")
    lock = RunLock(run_dir / "LOCK")
    path = run_dir / "slurm" / STEP.name
    try:
        with pytest.raises(RunDirectoryError, match=r"in use by process \d+ on "):
            srun_run._first(config, JobFolder(path=path, config=path / "config.yaml"), STEP, node_resources())
    finally:
        lock.release()
    assert {each.name for each in run_dir.iterdir()} == {"LOCK", "stop.json"}


def test_a_requeued_step_waits_for_the_lock_of_its_earlier_start(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(srun_run, "refuse_in_use", lambda run_dir, *, timeout_s: waited.append(timeout_s))
    monkeypatch.setattr(srun_run, "_write_files", Mock(side_effect=LaunchError("far enough")))
    for step in (STEP, replace(STEP, is_requeued=True)):
        with pytest.raises(LaunchError, match="far enough"):
            srun_run._first(config, JobFolder(path=tmp_path, config=tmp_path / "x"), step, node_resources())
    assert waited == [0, LOCK_TIMEOUT_S]


def test_a_file_system_without_locks_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def without_locks(*given: object) -> None:
        attempts.append(1)
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", without_locks)
    with pytest.raises(RunDirectoryError, match="has no locks"):
        refuse_in_use(tmp_path, timeout_s=60)
    assert len(attempts) == 1


def test_the_files_of_a_step_leave_a_stop_request_where_it_is(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "run" / "slurm" / STEP.name
    (tmp_path / "run").mkdir()
    write_request(tmp_path / "run", reason="for the run that goes on")
    srun_run._write_files(config, JobFolder(path=path, config=path / "config.yaml"), STEP)
    assert read_request(tmp_path / "run") is not None


def test_a_step_of_one_task_runs_as_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    assert not has_several_tasks()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert has_several_tasks()
