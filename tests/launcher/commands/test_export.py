"""An export of a run that had another cluster: where its trainer starts, and under which partition."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.checks.memory import export_problems
from launcher.cluster.node import NodeResources
from launcher.commands import export as command
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import ClusterConfig, ExportConfig, RunConfig
from launcher.errors import ConfigError, RunDirectoryError
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.exported import exported_step
from megatron_rl.checkpoints.damage import DamagedCheckpointError
from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.memory import TRAINER_PROCESS_BYTES
from megatron_rl.ranks import TrainerRank
from megatron_rl.trainer.messages import TrainerSpec
from megatron_rl.weights.state_sizes import rank_state
from rollout.failures import CallError
from tests.launcher.checks.test_formats import QWEN_7B

NODE = NodeResources(cpu_cores=8, available_bytes=16 << 30, gpu_bytes=())
JOB = """
trainer:
  parallel: {tensor: 1, pipeline: 2, data: 2}
cluster: {address: auto, min_nodes: 2, max_nodes: 2}
"""


class Started:
    """Stands for the processes of an export, and for its trainer; keeps what they were started with."""

    cluster: ClusterConfig
    placed: Mapping[str, int]
    parallel: ParallelConfig
    num_ranks: int
    calls: list[tuple[str, str]]
    has_ended: bool = False
    fault: BaseException | None = None
    """Raised after the first file of an export."""
    damage: Exception | None = None
    """What a rank finds in the checkpoint."""

    @contextmanager
    def processes(
        self,
        cluster: ClusterConfig,
        *,
        num_actors: int,
        log_dir: Path | None,
        nodes: Sequence[NodeResources],
        placed: Mapping[str, int],
    ) -> Iterator["Started"]:
        self.cluster, self.placed, self.calls = cluster, placed, []
        self.has_ended = False
        try:
            yield self
        finally:
            self.has_ended = True

    def start_trainer(self, spec: TrainerSpec, ranks: Sequence[TrainerRank]) -> "Started":
        self.parallel, self.num_ranks = spec.config.parallel, len(ranks)
        self.calls.append(("load", spec.exports))
        if self.damage is not None:
            raise CallError("trainer.join failed") from self.damage
        return self

    def export(self, path: str) -> None:
        self.calls.append(("export", path))
        partial = Path(f"{path}.partial")  # as the trainer's writer does, which removes an earlier one
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        (partial / "model.safetensors").write_text("weights")
        if self.fault is not None:
            raise self.fault
        partial.rename(path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(command, "processes", started.processes)
    monkeypatch.setattr(command, "node_resources", lambda: NODE)
    monkeypatch.setattr(command, "joined_nodes", lambda cluster: pytest.fail("it joined a cluster"))
    return started


@pytest.fixture
def run_dir(write_config: Callable[[str], Path], tmp_path: Path) -> Path:
    """The directory of a run of a SLURM job with two nodes and four trainer ranks, which has saved step 3."""
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints" / "3").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(resolved_yaml(load(RunConfig, write_config(JOB))))
    return run_dir


def export(run_dir: Path, *overrides: str) -> None:
    command.export(ExportConfig(run_dir=str(run_dir), output_dir=str(run_dir.parent / "out"), overrides=overrides))


def test_a_run_of_a_job_is_exported_on_this_machine_by_one_replica(started: Started, run_dir: Path) -> None:
    export(run_dir)
    assert (started.cluster.address, started.cluster.min_nodes, started.cluster.max_nodes) == ("local", 1, 0)
    assert started.parallel == ParallelConfig(pipeline=2) and started.num_ranks == 2
    checkpoint, partial = run_dir / "checkpoints" / "3" / "trainer", run_dir.parent / ".megatron-rl-export.out"
    assert started.calls == [("load", str(checkpoint)), ("export", str(partial))]
    assert (run_dir.parent / "out" / "model.safetensors").read_text() == "weights"


def test_an_export_removes_what_a_failed_or_killed_one_left_and_no_other_folder(
    started: Started, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, remove = run_dir.parent, shutil.rmtree
    others = {"out.partial", "out.partial.partial"}
    for name in others:
        (place / name).mkdir()
        (place / name / "mine").write_text("somebody else's")
    before = {path.name for path in place.iterdir()}
    started.fault = OSError("no space left on device")
    with pytest.raises(OSError, match="no space"):
        export(run_dir)
    assert {path.name for path in place.iterdir()} == before and started.has_ended
    started.fault = KeyboardInterrupt()
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)  # as if it were killed
    with pytest.raises(KeyboardInterrupt):
        export(run_dir)
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert {path.name for path in place.iterdir()} == before | {".megatron-rl-export.out.partial"}
    started.fault = None
    export(run_dir)
    assert {path.name for path in place.iterdir()} == before | {"out"}
    assert all((place / name / "mine").read_text() == "somebody else's" for name in others)


def test_an_export_overwrites_nothing_also_what_was_made_while_it_was_written(
    started: Started, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, write = run_dir.parent / "out", started.export

    def somebody_else_is_faster(path: str) -> None:
        write(path)
        target.mkdir()
        (target / "mine").write_text("somebody else's")

    monkeypatch.setattr(started, "export", somebody_else_is_faster)
    for _ in range(2):
        with pytest.raises(ConfigError, match="out exists; an export overwrites nothing"):
            export(run_dir)
        assert [path.name for path in target.iterdir()] == ["mine"]
    assert not list(run_dir.parent.glob(".megatron-rl-export*"))


def test_an_export_on_the_cpu_beside_gpus_is_refused(
    started: Started, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "machine_problems", lambda cluster: [f"{cluster.address} GPUs, packages for CPUs"])
    with pytest.raises(ConfigError, match="local GPUs, packages for CPUs"):
        export(run_dir)
    assert not hasattr(started, "cluster"), "nothing was started"


def test_without_a_step_the_checkpoint_is_exported_from_which_the_run_resumes(started: Started, run_dir: Path) -> None:
    checkpoints, target = run_dir / "checkpoints", run_dir.parent / "out"
    (checkpoints / "8").mkdir()  # of steps that were given up by hand
    (checkpoints / "latest").write_text("3\n")
    export(run_dir)
    assert started.calls[0] == ("load", str(checkpoints / "3" / "trainer"))
    target.rename(run_dir.parent / "first")
    command.export(ExportConfig(run_dir=str(run_dir), output_dir=str(target), step=8))
    assert started.calls[0] == ("load", str(checkpoints / "8" / "trainer"))
    (checkpoints / "3").rmdir()
    target.rename(run_dir.parent / "second")
    with pytest.raises(RunDirectoryError, match="latest names step 3"):
        export(run_dir)


def test_a_damaged_checkpoint_is_refused_with_what_to_export_instead(started: Started, run_dir: Path) -> None:
    started.damage = DamagedCheckpointError("common.pt is damaged")
    with pytest.raises(
        ConfigError, match=r"3 cannot be used: common\.pt is damaged; the run holds no other checkpoint"
    ):
        export(run_dir)
    for step in (8, 12):
        (run_dir / "checkpoints" / str(step)).mkdir()
    with pytest.raises(ConfigError, match=r"12 cannot be used: common\.pt is damaged; name another `step`: 3, 8$"):
        export(run_dir)
    started.damage = OSError("Stale file handle")
    with pytest.raises(CallError, match="join failed"):
        export(run_dir)


def test_an_export_names_its_step(started: Started, run_dir: Path) -> None:
    export(run_dir)
    assert exported_step(run_dir.parent / "out") == 3


def test_an_export_into_the_directory_of_a_run_holds_its_lock(
    started: Started, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that begins or ends removes what is unfinished there."""
    into = ExportConfig(run_dir=str(run_dir), output_dir=str(run_dir / "policy"))
    with RunDirectory(run_dir), pytest.raises(RunDirectoryError, match="is in use by"):
        command.export(into)

    def export_while_a_run_begins(path: str) -> None:
        with pytest.raises(RunDirectoryError, match="is in use by"):
            RunDirectory(run_dir)
        Path(path).mkdir()

    monkeypatch.setattr(started, "export", export_while_a_run_begins)
    command.export(into)
    assert exported_step(run_dir / "policy") == 3
    RunDirectory(run_dir).close()


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    """Seven billion parameters in BF16, of which each of two tensor-parallel ranks holds about half."""
    spec, trainer = QWEN_7B, TrainerConfig(parallel=ParallelConfig(tensor=2), fp8="blockwise_param")
    weights = rank_state(spec, trainer.model_copy(update={"fp8": "none"}), pipeline_rank=0).parameters
    assert 6.5 < weights / 2**30 < 8

    def problems(*gpus: int, host: int = 1, is_alone: bool = True) -> list[str]:
        node = NodeResources(cpu_cores=8, available_bytes=host, gpu_bytes=gpus)
        return export_problems(spec, trainer, node, is_alone=is_alone)

    assert problems(24 << 30, 24 << 30) == []
    (small,) = problems(24 << 30, 7 << 30)
    assert "a rank's weights take" in small and "raise `trainer.parallel.tensor` or `pipeline`" in small
    assert problems(host=2 * (weights + TRAINER_PROCESS_BYTES)) == []
    (too_small,) = problems(host=2 * weights)
    assert "the weights of all ranks take" in too_small
    assert problems(is_alone=False) == []


@pytest.mark.parametrize("present", [True, False])
def test_a_directory_without_checkpoints_is_refused(started: Started, run_dir: Path, present: bool) -> None:
    (run_dir / "checkpoints" / "3").rmdir()
    if not present:
        (run_dir / "checkpoints").rmdir()
    with pytest.raises(ConfigError, match="holds no checkpoint; name"):
        export(run_dir)


def test_overrides_name_the_partition_and_a_running_cluster(
    started: Started, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = [NodeResources(cpu_cores=8, available_bytes=1, gpu_bytes=(), name=name) for name in ("a", "b")]
    monkeypatch.setattr(command, "joined_nodes", lambda cluster: joined)
    export(run_dir, "cluster.address=auto", "trainer.parallel.pipeline=1", "trainer.parallel.data=4")
    assert (started.cluster.address, started.cluster.min_nodes) == ("auto", 1)
    assert started.parallel == ParallelConfig(data=4) and set(started.placed) == {"a", "b"}


def test_an_impossible_partition_is_refused(started: Started, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="tensor = 3 does not divide the model's 4 attention heads"):
        export(run_dir, "trainer.parallel.tensor=3")
    with pytest.raises(ConfigError, match=r"unknown key `trainer\.parallel\.pipelines`; did you mean"):
        export(run_dir, "trainer.parallel.pipelines=1")
