"""`megatron-rl slurm` on a real SLURM cluster whose nodes are namespaces of this machine: `make test-cluster`."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from launcher.run_dir.atomic_files import read_rows
from tests.support.cluster.slurm_cluster import SlurmCluster, slurm_cluster
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT

pytestmark = pytest.mark.multinode


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
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster") / "slurm", num_nodes=2) as started:
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
        "algorithm": {"prompts_per_step": 4, "group_size": 4, "drop_zero_variance": False},
        "trainer": {"dtype": "fp32", "max_micro_batch_tokens": 512, "parallel": {"tensor": 2, "data": 2}},
        "history": {"drafts": False},
        "wandb": {"mode": "disabled"},
        "cluster": {"slurm": {"nodes": 2, "cpus_per_node": 4, "environment": ["PYTHONPATH", "OMP_NUM_THREADS"]}},
    }
    path.write_text(yaml.safe_dump(config))
    return path


def submit(cluster: SlurmCluster, work: Path, *overrides: str) -> tuple[int, Path]:
    """Number and log of a job, submitted from a directory that is not the checkout."""
    variables = [f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"]
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


def test_two_nodes_run_two_steps_and_nothing_is_left_on_them(cluster: SlurmCluster, work: Path) -> None:
    job, log = submit(cluster, work)
    output = wait_for_end(cluster, job, log)
    run_dir = work / "run"
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [0, 1], output
    assert output.rstrip().endswith("the run is done")
    logs = {path.relative_to(run_dir / "logs").as_posix() for path in (run_dir / "logs").rglob("*.log")}
    assert {"node1/ray.log", "node2/ray.log"} <= logs
    for number, node in enumerate(cluster.nodes):
        assert {f"{node}/engine-{number}.log", *(f"{node}/trainer-{2 * number + rank}.log" for rank in (0, 1))} <= logs
        assert left_on(cluster, node) == NOTHING
    job_dir = run_dir / "slurm" / f"{job}.0"
    assert (job_dir / "token").stat().st_mode & 0o777 == 0o600
    assert json.loads((job_dir / "checks" / "node2.json").read_text())["problems"] == []
    assert list(Path("/tmp").glob(f"mrl-{job}-*")) == []


def test_a_signal_stops_the_run_and_the_requeued_job_goes_on(cluster: SlurmCluster, work: Path) -> None:
    run_dir = work / "signalled"
    job, log = submit(cluster, work, "run_dir=signalled", "num_steps=4", "checkpoint.every=0")
    wait_until(lambda: bool(read_rows(run_dir / "metrics.jsonl")), log)
    cluster.login("scancel", "--batch", "--signal=USR1", str(job))
    wait_until(lambda: "requeued" in log.read_text(), log)
    restart(cluster, job)
    output = wait_for_end(cluster, job, log)
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [0, 1, 2, 3], output
    assert output.rstrip().endswith("the run is done")
    first, second = read_rows(run_dir / "slurm" / "starts.jsonl")
    assert first["step"] == 0 and int(str(second["step"])) >= 1
    assert {node: left_on(cluster, node) for node in cluster.nodes} == dict.fromkeys(cluster.nodes, NOTHING)


def test_a_node_that_dies_costs_a_requeue_and_no_finished_step(cluster: SlurmCluster, work: Path) -> None:
    run_dir = work / "lost"
    job, log = submit(cluster, work, "run_dir=lost", "num_steps=4", "checkpoint.every=1")
    wait_until(lambda: (run_dir / "checkpoints" / "latest").exists(), log)
    cluster.kill("node2")
    wait_until(lambda: cluster.login("squeue", "-h", "-j", str(job), "-o", "%T").strip() == "PENDING", log)
    cluster.boot("node2")
    restart(cluster, job)
    output = wait_for_end(cluster, job, log)
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [0, 1, 2, 3], output
    starts = [int(str(row["step"])) for row in read_rows(run_dir / "slurm" / "starts.jsonl")]
    assert starts[0] == 0 and starts[-1] >= 1


def wait_until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


def restart(cluster: SlurmCluster, job: int) -> None:
    """SLURM lets a requeued job wait for two minutes; start it now."""
    cluster.login("scontrol", "update", f"jobid={job}", "starttime=now")
