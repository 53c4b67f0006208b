"""`megatron-rl slurm` on a real SLURM cluster whose nodes are namespaces of this machine: `make test-cluster`."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import yaml

from launcher.cluster.ports import BLOCK, ephemeral_range, port_maps
from launcher.run_dir.atomic_files import read_rows
from launcher.run_dir.places import Places, read_places
from launcher.run_dir.status import read_now
from tests.support.cluster.slurm_cluster import Listening, SlurmCluster, slurm_cluster
from tests.support.cluster.slurm_config import URGENT
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT
from tests.support.runs.whole_runs import NOT_REPEATABLE

pytestmark = pytest.mark.multinode
SETTLE_S = 5.0
"""A requeued job that starts in the second of its end is killed for good: slurmd takes its credential for the old one.

Neither can SLURM start steps on a node in the node's first seconds. SLURM itself waits for two minutes.
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and an untrained model of the arithmetic example."""
    path = tmp_path_factory.mktemp("work")
    sizes = ["--train", "64", "--held-out", "16", "--warm-start", "512"]
    for command in (
        ["examples.arithmetic.make_data", "--out", str(path / "data"), *sizes],
        ["examples.arithmetic.make_model", "--out", str(path / "model")],
    ):
        subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT)
    prompts = (path / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (path / "data" / "few.jsonl").write_text("".join(prompts[:4]))
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster") / "slurm", num_nodes=4) as started:
        yield started


def configuration(work: Path) -> Path:
    """INT8 rollouts; two replicas of two tensor ranks, and two engines: a replica and an engine on each node."""
    path = work / "rl.yaml"
    config = {
        "model": "model",
        "run_dir": "run",
        "num_steps": 2,
        "data": {"train": [{"path": "data/train.jsonl"}], "max_prompt_tokens": 96},
        "sampling": {"max_response_tokens": 48},
        "engine": {
            **{"format": "int8", "num_engines": 2, "max_num_seqs": 16, "kv_cache_bytes": 64 << 20},
            **{"bf16_first_layers": 0, "bf16_last_layers": 1},
        },
        "algorithm": {"prompts_per_step": 4, "group_size": 4, "filter": "none"},
        "trainer": {"dtype": "fp32", "max_micro_batch_tokens": 512, "parallel": {"tensor": 2, "data": 2}},
        "history": {"drafts": False},
        "checkpoint": {"every": 1},
        "wandb": {"mode": "disabled"},
        "cluster": {"slurm": {"nodes": 2, "cpus_per_node": 4, "environment": ["PYTHONPATH", "OMP_NUM_THREADS"]}},
    }
    path.write_text(yaml.safe_dump(config))
    return path


def submit(cluster: SlurmCluster, work: Path, *overrides: str, path: str = "") -> tuple[int, Path]:
    """Number and log of a job, submitted from a directory that is not the checkout; `path` replaces PATH."""
    variables = [f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", *([f"PATH={path}"] if path else [])]
    command = ["env", *variables, sys.executable, "-m", "launcher", "slurm", str(configuration(work)), *overrides]
    job, log = cluster.login(*command, cwd=work).splitlines()
    return int(job.removeprefix("job ")), Path(log.removeprefix("log: "))


def wait_for_end(cluster: SlurmCluster, job: int, log: Path) -> str:
    """The job's output once it has left the queue."""
    deadline = time.monotonic() + DEADLINE_S
    while cluster.login("squeue", "-h", "-j", str(job), check=False).strip():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(1)
    return log.read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """A job that has left the queue."""

    number: int
    log: str
    run_dir: Path
    sockets: Mapping[str, Sequence[Listening]]
    """By node, after the first step."""


def left_on_nodes(cluster: SlurmCluster) -> dict[str, dict[str, list[str]]]:
    """`left_on` of every node."""
    return {node: left_on(cluster, node) for node in cluster.nodes}


def left_on(cluster: SlurmCluster, node: str) -> dict[str, list[str]]:
    """Processes, shared memory and listening ports of a node, without SLURM's."""
    processes = cluster.on(node, "ps", "-e", "-o", "args=").splitlines()
    ports = cluster.on(node, "ss", "-Htln").splitlines()
    return {
        "processes": [line for line in processes if not line.startswith(SLURMS) and "<defunct>" not in line],
        "shared memory": cluster.on(node, "ls", "-A", "/dev/shm").split(),
        "ports": [line for line in ports if not line.split()[3].endswith(":6818")],
    }


SLURMS = ("/usr/sbin/slurmd", "slurmstepd", "ps -e")
"""slurmd is process 1 of a node and leaves its children's entries unread, which are no processes any more."""
NOTHING: dict[str, list[str]] = {"processes": [], "shared memory": [], "ports": []}


DRAFTS = ("history.drafts=true", "data.train=[{path: data/few.jsonl}]")
"""Every step has the same prompts, so that engines draft from the step before."""

ALIKE_STEPS = 12
"""Steps of a second each: a signal that SLURM sends after the first of them has to come before the last."""

ALIKE = ("deterministic=true", "engine.num_engines=1", f"num_steps={ALIKE_STEPS}")
"""Overrides of runs with equal metrics."""


class FirstJobs(NamedTuple):
    """Jobs that run side by side, on different nodes but for one."""

    two_nodes: EndedJob
    """A run of two steps over two nodes with an engine on each, and the sockets of its nodes after the first step."""
    undisturbed: Path
    """Directory of a deterministic run on a third node, beside another job on the same node, which is cancelled."""


@pytest.fixture(scope="module")
def first_jobs(cluster: SlurmCluster, work: Path) -> FirstJobs:
    two, log = submit(cluster, work, *DRAFTS)
    third = "cluster.slurm.extra=[--nodelist=node3]"
    small = ["run_dir=beside", "num_steps=99", "trainer.parallel.tensor=1", "trainer.parallel.data=1"]
    one, its_log = submit(cluster, work, "run_dir=one_node", *ALIKE, "cluster.slurm.nodes=1", third)
    other, other_log = submit(cluster, work, *small, "engine.num_engines=1", "cluster.slurm.nodes=1", third)
    sockets: dict[str, Sequence[Listening]] = {}
    neighbour: str | None = None

    def watch() -> bool:
        nonlocal neighbour
        if neighbour is None and at(work / "beside", 0, "rollout"):
            neighbour = state(cluster, one)
            cluster.login("scancel", str(other))
        if not sockets and read_rows(work / "run" / "metrics.jsonl"):
            sockets.update({node: cluster.listening(node) for node in cluster.nodes[:2]})
        return neighbour is not None and bool(sockets)

    wait_until(watch, other_log)
    assert neighbour == "RUNNING", "its neighbour was to be cancelled beside it"
    output = wait_for_end(cluster, two, log)
    its_output, other_output = wait_for_end(cluster, one, its_log), wait_for_end(cluster, other, other_log)
    assert its_output.rstrip().endswith("the run is done"), its_output
    assert "was terminated" in other_output and "requeued" not in other_output, other_output
    wait_until(lambda: left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING), other_log)
    return FirstJobs(EndedJob(number=two, log=output, run_dir=work / "run", sockets=sockets), work / "one_node")


@pytest.fixture(scope="module")
def two_nodes(first_jobs: FirstJobs) -> EndedJob:
    return first_jobs.two_nodes


@pytest.fixture(scope="module")
def undisturbed(first_jobs: FirstJobs) -> Path:
    return first_jobs.undisturbed


def test_two_nodes_run_all_steps_and_nothing_is_left_on_them(cluster: SlurmCluster, two_nodes: EndedJob) -> None:
    run_dir = two_nodes.run_dir
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [0, 1], two_nodes.log
    assert two_nodes.log.rstrip().endswith("the run is done")
    logs = {path.relative_to(run_dir / "logs").as_posix() for path in (run_dir / "logs").rglob("*.log")}
    assert {"node1/ray.log", "node2/ray.log"} <= logs
    for number, node in enumerate(cluster.nodes[:2]):
        assert {f"{node}/engine-{number}.log", *(f"{node}/trainer-{2 * number + rank}.log" for rank in (0, 1))} <= logs
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)
    job_dir = run_dir / "slurm" / f"{two_nodes.number}.0"
    assert (job_dir / "token").stat().st_mode & 0o777 == 0o600
    assert json.loads((job_dir / "checks" / "node2.json").read_text())["problems"] == []
    assert list(Path("/tmp").glob(f"mrl-{two_nodes.number}-*")) == []


def test_seconds_of_each_phase_to_the_first_step_are_listed(two_nodes: EndedJob) -> None:
    lines = two_nodes.log.splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith("from submission to the end of")]
    listed = {line[:30].strip() for line in lines[first + 1 : first + 12] if line.startswith("  ")}
    assert {"submission", "node checks", "Ray on the nodes", "engines: rollout", "trainer: train"} <= listed


KERNEL_CHOOSES = ("ray::TrainerAct", "VLLM::EngineCor", "srun")
"""Processes whose sockets of gloo, of torch's store and of SLURM have ports that the kernel chooses."""


def test_sockets_that_others_can_reach_are_in_the_block_of_the_job(two_nodes: EndedJob) -> None:
    first = next(port_maps(two_nodes.number, ephemeral=ephemeral_range())).base
    low, high = ephemeral_range()
    for sockets in two_nodes.sockets.values():
        outside = [at for at in sockets if not first <= at.port < first + BLOCK]
        assert len(outside) < len(sockets)
        assert [at for at in outside if at.process not in KERNEL_CHOOSES or not low <= at.port <= high] == []


WILDCARDS = ("0.0.0.0", "[::]", "*")
"""Addresses of sockets that listen on every device of their node."""


def test_sockets_of_process_groups_listen_on_the_network_of_the_cluster_only(two_nodes: EndedJob) -> None:
    """Ray's, which ask for its token, have ports of the job's block and may listen everywhere."""
    low, high = ephemeral_range()
    ours = [
        at
        for sockets in two_nodes.sockets.values()
        for at in sockets
        if at.process in KERNEL_CHOOSES[:2] and low <= at.port <= high
    ]
    assert ours and [at for at in ours if at.host in WILDCARDS] == []


def test_a_preempted_job_continues_with_the_metrics_of_an_undisturbed_run_on_one_node(
    cluster: SlurmCluster, work: Path, undisturbed: Path
) -> None:
    """SLURM sends the signal of the script to the preempted job; a run over two nodes equals one on one node."""
    run_dir = work / "preempted"
    job, log = submit(cluster, work, "run_dir=preempted", *ALIKE)
    wait_until(lambda: bool(read_rows(run_dir / "metrics.jsonl")), log)
    wide = ["--parsable", f"--partition={URGENT}", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true"]
    urgent = int(cluster.login("sbatch", *wide, cwd=work))
    wait_until(lambda: any(end in log.read_text() for end in ("requeued", "the run is done")), log)
    assert "requeued" in log.read_text(), "the run ended before the signal came"
    wait_until(lambda: not state(cluster, urgent), log)
    restart(cluster, job, log)
    output = wait_for_end(cluster, job, log)
    assert output.rstrip().endswith("the run is done")
    assert repeatable(run_dir) == repeatable(undisturbed)
    first, second = read_rows(run_dir / "slurm" / "starts.jsonl")
    assert first["step"] == 0 and int(str(second["step"])) >= 1
    assert "; 0 finished step(s) are repeated" in output
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


def test_a_colocated_run_continues_disaggregated_on_three_nodes_and_then_on_two(
    cluster: SlurmCluster, work: Path, two_nodes: EndedJob
) -> None:
    """In the last step the second engine's node is cut off; the first engine goes on alone."""
    apart = ["placement.mode=disaggregated", "trainer.parallel.data=1", "cluster.slurm.nodes=3"]
    job, log = submit(cluster, work, "num_steps=5", *DRAFTS, *apart)
    run_dir = two_nodes.run_dir
    wait_until(lambda: at(run_dir, 4, "rollout"), log, every_s=0.01)
    logs = {path.relative_to(run_dir / "logs").as_posix() for path in (run_dir / "logs").rglob("engine-*.log")}
    assert {"node2/engine-0.log", "node3/engine-1.log"} <= logs
    cluster.cut("node3")
    output = wait_for_end(cluster, job, log)
    cluster.mend("node3")
    resume(cluster, "node3", log)
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4], output
    assert [row["engine/serving"] for row in rows] == [2, 2, 2, 2, 1]
    assert [row["cluster/lost_nodes"] for row in rows][2:] == [0, 0, 1]
    assert [row["history/hit_rate"] for row in rows][:4] == [0, 1, 1, 1], "the checkpoint brings the history along"
    assert [row["history/lost_calls"] for row in rows][:4] == [0, 0, 0, 0]
    assert "lost node3: engine(s) [1] are given up; 1 of 2 serve" in output
    assert "requeued" not in output and output.rstrip().endswith("the run is done")
    # SLURM ends what was cut off
    wait_until(lambda: left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING), log)


def test_a_spare_node_replaces_one_with_trainer_ranks_and_metrics_stay_those_of_an_undisturbed_run(
    cluster: SlurmCluster, work: Path, undisturbed: Path
) -> None:
    """The node dies in a publish."""
    run_dir, num_steps = work / "spare", 5
    job, log = submit(cluster, work, "run_dir=spare", *ALIKE, f"num_steps={num_steps}", "cluster.slurm.spares=1")
    wait_until(lambda: at(run_dir, 1, "publish"), log, every_s=0.01)
    cluster.kill("node2")
    output = wait_for_end(cluster, job, log)
    cluster.boot("node2")
    resume(cluster, "node2", log)
    assert "spare: node3" in output and "lost node2: node3 replaces it" in output
    assert "requeued" not in output and output.rstrip().endswith("the run is done")
    rows = read_rows(run_dir / "metrics.jsonl")
    # the checkpoint under way does not count, so that the step before may be repeated, too
    assert [row["cluster/lost_nodes"] for row in rows][1:] == [1] * (num_steps - 1), output
    assert repeatable(run_dir, *COUNTS_OF_LOSSES) == repeatable(undisturbed, *COUNTS_OF_LOSSES)[:num_steps]
    assert read_places(run_dir) == Places(engines=("node1",), trainers=("node1", "node1", "node3", "node3"))
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


@pytest.mark.faults
def test_engines_of_a_lost_node_move_to_a_spare_node(cluster: SlurmCluster, work: Path) -> None:
    """The only node with engines dies in a rollout; the trainer's goes on."""
    run_dir = work / "moved"
    apart = ["placement.mode=disaggregated", "trainer.parallel.data=1", "num_steps=3", "run_dir=moved"]
    job, log = submit(cluster, work, *apart, "engine.num_engines=1", "cluster.slurm.spares=1")
    wait_until(lambda: at(run_dir, 1, "rollout"), log, every_s=0.01)
    before = read_places(run_dir)
    cluster.kill("node2")
    output = wait_for_end(cluster, job, log)
    cluster.boot("node2")
    resume(cluster, "node2", log)
    assert before == Places(engines=("node2",), trainers=("node1", "node1"))
    assert read_places(run_dir) == Places(engines=("node3",), trainers=("node1", "node1")), output
    assert "lost node2: node3 replaces it" in output
    assert "requeued" not in output and output.rstrip().endswith("the run is done")
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and {row["batch/groups"] for row in rows} == {4}
    assert [row["trainer/restarts"] for row in rows] == [0, 0, 0]
    assert [row["cluster/lost_nodes"] for row in rows] == [0, 1, 1]
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


@pytest.mark.faults
def test_without_a_spare_node_the_trainer_takes_one_of_the_engines(cluster: SlurmCluster, work: Path) -> None:
    run_dir = work / "given"
    apart = ["placement.mode=disaggregated", "cluster.slurm.nodes=4", "num_steps=3", "run_dir=given"]
    job, log = submit(cluster, work, *apart)
    wait_until(lambda: at(run_dir, 1, "train"), log, every_s=0.01)
    cluster.kill("node2")
    output = wait_for_end(cluster, job, log)
    cluster.boot("node2")
    resume(cluster, "node2", log)
    assert "lost node2: node4 replaces it, whose engine(s) [1] leave; 1 of 2 serve" in output
    assert "requeued" not in output and output.rstrip().endswith("the run is done")
    rows = read_rows(run_dir / "metrics.jsonl")
    # the checkpoint under way does not count, so that the first step may be repeated, too
    assert [row["engine/serving"] for row in rows][1:] == [1, 1], output
    assert [row["trainer/restarts"] for row in rows][1:] == [1, 1]
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


APPTAINER = """#!/bin/sh
# `apptainer exec --nv --pwd FOLDER [--bind SOURCE:TARGET]... IMAGE COMMAND`: mounts as there, the files of the node
[ "$1 $2 $3" = "exec --nv --pwd" ] || exit 64
folder=$4; shift 4
binds=
while [ "$1" = --bind ]; do binds="$binds --bind ${2%%:*} ${2#*:}"; shift 2; done
[ -f "$1" ] || exit 255
shift
echo "$SLURMD_NODENAME $4" >> "@WORK@/parts"
exec bwrap --dev-bind / / $binds --chdir "$folder" "$@"
"""
"""Stands in for Apptainer, which Debian does not have."""


@pytest.mark.faults
def test_every_part_of_a_job_runs_in_its_container(cluster: SlurmCluster, work: Path) -> None:
    programs, image, mounted = work / "programs", work / "image.sif", work / "mounted"
    for folder in (programs, mounted, work / "source"):
        folder.mkdir()
    (programs / "apptainer").write_text(APPTAINER.replace("@WORK@", str(work)))
    (programs / "apptainer").chmod(0o755)
    image.touch()
    container = {"kind": "apptainer", "image": str(image), "python": sys.executable}
    overrides = [f"cluster.slurm.container.{name}={value}" for name, value in container.items()]
    mounts = f"cluster.slurm.container.mounts=['{work / 'source'}:{mounted}']"
    path = f"{programs}:{os.environ['PATH']}"
    job, log = submit(cluster, work, "run_dir=contained", "num_steps=1", mounts, *overrides, path=path)
    output = wait_for_end(cluster, job, log)
    assert [row["step"] for row in read_rows(work / "contained" / "metrics.jsonl")] == [0], output
    parts = (work / "parts").read_text().splitlines()
    everywhere = [f"{node} {part}" for node in cluster.nodes[:2] for part in ("check", "reduce", "node")]
    assert sorted(parts) == sorted([*everywhere, "node1 choose", "node1 drive", "node1 decide"])
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


@pytest.mark.faults
def test_tasks_of_a_job_array_on_the_same_nodes_do_not_meet(cluster: SlurmCluster, work: Path) -> None:
    line = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-m", "launcher", "run"]
    step = ["srun", "--cpu-bind=none", *line, str(configuration(work)), "run_dir=array_$SLURM_ARRAY_TASK_ID"]
    options = ["--parsable", "--array=0-1", "--nodelist=node1,node2", "--ntasks-per-node=1", "--cpus-per-task=4"]
    log = work / "array.out"
    command = [*options, f"--output={log}", "--open-mode=append", f"--wrap={' '.join(step)} num_steps=1"]
    output = wait_for_end(cluster, int(cluster.login("sbatch", *command, cwd=work)), log)
    for number in (0, 1):
        assert [row["step"] for row in read_rows(work / f"array_{number}" / "metrics.jsonl")] == [0], output
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


@pytest.mark.faults
def test_the_tasks_of_a_step_run_together_without_a_batch_script(cluster: SlurmCluster, work: Path) -> None:
    line = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-m", "launcher", "run"]
    step = ["srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--cpu-bind=none"]
    output = cluster.login(*step, *line, str(configuration(work)), "run_dir=by_hand", "num_steps=1", cwd=work)
    assert [row["step"] for row in read_rows(work / "by_hand" / "metrics.jsonl")] == [0], output
    logs = {path.parent.name for path in (work / "by_hand" / "logs").rglob("engine-*.log")}
    assert logs == {"node1", "node2"}
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


HERE = "cluster.slurm.extra=['--nodelist=node1,node2']"
SAVED = "checkpoint.background=false"
"""Each step begins with the checkpoint of the step before."""


def test_a_node_without_the_data_is_refused_by_name(cluster: SlurmCluster, work: Path) -> None:
    cluster.on("node2", "mount", "-t", "tmpfs", "tmpfs", str(work / "data"))
    job, log = submit(cluster, work, "run_dir=unmounted", HERE)
    output = wait_for_end(cluster, job, log)
    cluster.on("node2", "umount", str(work / "data"))
    assert "left out: node2: cannot read data/train.jsonl" in output
    assert "1 of 2 nodes are healthy" in output
    assert not (work / "unmounted" / "metrics.jsonl").exists()
    wait_until(lambda: left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING), log)


class Loss(NamedTuple):
    """A node that is lost; node1 has Ray's head and the batch script."""

    step: int
    """Finished steps when it happens."""
    phase: str
    node: str
    fault: Literal["dies", "is cut off"] = "dies"

    @property
    def next_start(self) -> tuple[int, ...]:
        """Steps with which the next start may begin: a checkpoint that was under way counts if it was whole.

        The evaluation after the last step comes before its checkpoint.
        """
        return (self.step - 1, self.step) if self.phase in ("checkpoint", "evaluate") else (self.step,)


EACH_PHASE = (
    *(Loss(0, "publish", "node2"), Loss(0, "evaluate", "node1"), Loss(1, "rollout", "node2")),
    *(Loss(2, "train", "node1"), Loss(2, "start", "node2"), Loss(3, "publish", "node2")),
    *(Loss(4, "checkpoint", "node1"), Loss(4, "rollout", "node2", "is cut off")),
    Loss(4, "start", "node2", "is cut off"),
    *(Loss(5, "train", "node2", "is cut off"), Loss(6, "publish", "node2", "is cut off")),
    *(Loss(7, "evaluate", "node2", "is cut off"), Loss(7, "checkpoint", "node2")),
)
"""The last checkpoint is the end of the run. A job is given up after three starts without a new step."""
EVALUATED = (
    "evaluation.sets={held_out: {path: data/held_out.jsonl, max_response_tokens: 48}}",
    "evaluation.bf16_before_after=false",
)


@pytest.mark.faults
@pytest.mark.timeout(5400)
def test_each_lost_node_costs_a_requeue_and_no_saved_step(cluster: SlurmCluster, work: Path, undisturbed: Path) -> None:
    num_steps = EACH_PHASE[-1].step
    run_dir = work / "losses"
    job, log = submit(cluster, work, "run_dir=losses", *ALIKE, *EVALUATED, f"num_steps={num_steps}", HERE, SAVED)
    for number, loss in enumerate(EACH_PHASE):  # SLURM's own health check takes a minute and is waited for once
        lose(cluster, job, log, run_dir, loss, told=number > 0)
    output = wait_for_end(cluster, job, log)
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == list(range(num_steps)), output
    assert repeatable(run_dir)[:3] == repeatable(undisturbed)[:3]
    starts = [int(str(row["step"])) for row in read_rows(run_dir / "slurm" / "starts.jsonl")]
    assert len(starts) == 1 + len(EACH_PHASE) and starts[0] == 0
    assert all(start in each.next_start for start, each in zip(starts[1:], EACH_PHASE, strict=True)), starts
    assert output.count("finished step(s) are repeated") == len(EACH_PHASE)
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


@pytest.mark.faults
def test_a_first_node_that_is_cut_off_ends_its_run_and_another_node_requeues_the_job(
    cluster: SlurmCluster, work: Path
) -> None:
    """The controller and the batch script go on without a network, and reach the files."""
    run_dir = work / "alone"
    job, log = submit(cluster, work, "run_dir=alone", *ALIKE, "num_steps=2", HERE, SAVED)
    lose(cluster, job, log, run_dir, Loss(1, "rollout", "node1", "is cut off"), told=True)
    output = wait_for_end(cluster, job, log)
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [0, 1], output
    assert "lost node2" in output, "the controller has seen that it is alone"
    assert output.count("the node of the batch script, node1, is lost: requeued") == 1
    assert [row["step"] for row in read_rows(run_dir / "slurm" / "starts.jsonl")] == [0, 1]
    assert left_on_nodes(cluster) == dict.fromkeys(cluster.nodes, NOTHING)


def lose(cluster: SlurmCluster, job: int, log: Path, run_dir: Path, loss: Loss, *, told: bool) -> None:
    """A node is lost, and comes back once the job is in the queue; SLURM is told, as a cluster's health check would."""
    step, phase, node, fault = loss
    wait_until(lambda: at(run_dir, step, phase), log, every_s=0.01)
    (cluster.kill if fault == "dies" else cluster.cut)(node)
    if told:
        cluster.login("scontrol", "update", f"nodename={node}", "state=down", "reason=fault")
    wait_until(lambda: state(cluster, job) == "PENDING", log)
    (cluster.boot if fault == "dies" else cluster.mend)(node)
    resume(cluster, node, log)
    restart(cluster, job, log)


def at(run_dir: Path, step: int, phase: str) -> bool:
    """Whether the run is at least in this phase of this step."""
    now = read_now(run_dir)
    return now is not None and ((now.step == step and now.phase == phase) or now.step > step)


def state(cluster: SlurmCluster, job: int) -> str:
    """SLURM's word for the state of a job; empty if it has left the queue."""
    return cluster.login("squeue", "-h", "-j", str(job), "-o", "%T", check=False).strip()


COUNTS_OF_LOSSES = ("trainer/re", "cluster/lost_nodes")
"""Begins of the names of metrics that count restarts of the trainer and lost nodes."""


def repeatable(run_dir: Path, *without: str) -> list[dict[str, object]]:
    """Metrics without times, and without those whose names begin with `without`."""
    left_out, rows = (*NOT_REPEATABLE, *without), read_rows(run_dir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows]


def wait_until(condition: Callable[[], bool], log: Path, *, every_s: float = 0.5) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(every_s)


def resume(cluster: SlurmCluster, node: str, log: Path) -> None:
    """Waits until a node takes jobs again."""
    cluster.login("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    wait_until(lambda: cluster.login("sinfo", "-h", "-n", node, "-o", "%T").strip() == "idle", log)


def restart(cluster: SlurmCluster, job: int, log: Path) -> None:
    """Starts a requeued job before SLURM would."""

    def is_started() -> bool:
        cluster.login("scontrol", "update", f"jobid={job}", "starttime=now", check=False)
        return state(cluster, job) in ("RUNNING", "")

    time.sleep(SETTLE_S)
    wait_until(is_started, log)
