"""Parts of a SLURM job, started by its batch script (`launcher/cluster/templates/slurm.sh`), never by a person.

check     on every node: facts and problems of the node, and the nodes that it cannot reach
choose    once: which nodes the run uses, and whether it may start
reduce    on every chosen node: a sum over all of them by gloo, and by NCCL where there are GPUs
node      on every chosen node: Ray, until the run is over
drive     on the first chosen node: `megatron-rl run`
decide    once: whether the job goes back into the queue
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from history.patience import AwakeClock
from launcher.checks.expected_nodes import expected_nodes
from launcher.cluster.addresses import interfaces, node_address, resolve
from launcher.cluster.alive_nodes import SPARE
from launcher.cluster.job_folder import Head, JobFolder
from launcher.cluster.node import node_resources
from launcher.cluster.placement import plan
from launcher.cluster.ports import free_ports
from launcher.cluster.ray_node import RayNode, make_temp_dir, run_ray, topology_labels
from launcher.commands.job_checks import check, choose, reduce
from launcher.commands.job_state import job_id, node_name, saved_step, say, starts
from launcher.commands.requeue import decide
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.endings.kinds import Ending
from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import replace_text
from launcher.run_dir.run_lock import RunLock
from launcher.run_dir.start_phases import StartPhases, read_phases
from launcher.run_dir.status import read_now
from launcher.run_dir.stop_request import ANSWERED, answer_request, read_request
from rollout.failures import DeadlineError

HEAD_TIMEOUT_S = 300.0
"""For which nodes and the driver wait for Ray's head."""
END_TIMEOUT_S = 90.0
"""For which the run may end after it was told to; then it is killed."""
_POLL_S = 0.5
_START_POLL_S = 0.1
"""Until the first step has ended: each of its phases is to be seen."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m launcher.commands.slurm_job", description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("config")
    arguments = parser.parse_args(argv)
    config = load(RunConfig, arguments.config)
    folder = JobFolder.of_this_job(Path(arguments.config))
    try:
        return PARTS[arguments.part](config, folder)
    except (ValueError, DeadlineError) as error:  # what a person can mend; anything else shows its traceback
        say(f"{arguments.part} on {node_name()}: {error}")
        if arguments.part == "node":
            folder.note_lost_node()
        return Ending.USER_INPUT.code if isinstance(error, ValueError) else Ending.DEADLINE.code


def node(config: RunConfig, folder: JobFolder) -> int:
    """Run Ray on this node until the run is over."""
    name, slurm = node_name(), config.cluster.slurm
    address, interface = node_address(name, slurm, present=interfaces(), resolved=resolve(name))
    ports = free_ports(job_id())
    head: Head | None = None
    if name == folder.nodes()[0]:
        folder.write_head(Head(address=address, port=ports.gcs, ready_port=ports.node_manager))
    else:
        head = folder.wait_for_head(HEAD_TIMEOUT_S)
        if head is None or not _wait_until_ready(head, folder):
            return 0 if folder.is_over() or folder.must_end() else Ending.DEADLINE.code
    spare = {SPARE: "true"} if folder.nodes().index(name) >= slurm.nodes else {}
    ray = RayNode(
        name=name,
        address=address,
        interface=interface,
        ports=ports,
        head=head,
        num_cpus=plan(config, expected_nodes(slurm, node_resources())).num_actors,
        num_gpus=slurm.gpus_per_node,
        object_store_bytes=config.cluster.object_store_bytes,
        labels=topology_labels(os.environ.get("SLURM_TOPOLOGY_ADDR", "")) | spare,
        temp_dir=make_temp_dir(job_id(), folder.nodes().index(name)),
    )
    say(f"{name}: address {address} ({interface}), ports {ports.base} to {ports.workers[1]}")
    return run_ray(ray, folder, log=folder.run_dir / "logs" / name / "ray.log")


def drive(config: RunConfig, folder: JobFolder) -> int:
    """Run the run; end it when the job is terminated or a node is lost."""
    head = folder.wait_for_head(HEAD_TIMEOUT_S)
    code = Ending.PROCESS_LOST.code
    if head is not None and _wait_until_ready(head, folder):
        stopped = _answer_early_request(folder)
        code = Ending.STOPPED.code if stopped else _run(folder, head, first_step=saved_step(folder))
    replace_text(folder.path / "code", f"{code}\n")
    return code


def _answer_early_request(folder: JobFolder) -> bool:
    """Answer a stop request that waits; whether it is of this job, made while the nodes started.

    One from before the job was for an earlier run, which has ended.
    """
    try:
        lock = RunLock(folder.run_dir / "LOCK")
    except RunDirectoryError:  # the request is for the run that has the lock; `megatron-rl run` refuses this one
        return False
    try:
        request = read_request(folder.run_dir)
        if request is None:
            return False
        answer_request(folder.run_dir)
        begun_s = (folder.path / "allocated").stat().st_mtime
        return request.time_s >= begun_s - 1  # the batch script writes whole seconds
    finally:
        lock.release()


def _run(folder: JobFolder, head: Head, *, first_step: int) -> int:
    line = [sys.executable, "-m", "launcher", "run", str(folder.config)]
    run = subprocess.Popen(line, env=os.environ | {"RAY_ADDRESS": f"{head.address}:{head.port}"})
    since_told: AwakeClock | None = None
    start = StartPhases(phases=read_phases(folder.phases))
    while run.poll() is None:
        time.sleep(_POLL_S if start.done else _START_POLL_S)
        # a status of another version, which the run replaces; or a file system that fails for a moment
        with suppress(RunDirectoryError, OSError):
            for text in start.follow(read_now(folder.run_dir), first_step=first_step):
                say(text)
        if since_told is None and (folder.is_over() or folder.must_end()):
            since_told = AwakeClock()
            run.terminate()
        elif since_told is not None and since_told() > END_TIMEOUT_S:
            run.kill()
    return run.returncode


def decide_requeue(config: RunConfig, folder: JobFolder) -> int:
    """Say whether the job goes back into the queue, and leave a file for the batch script if it does."""
    code = int((folder.path / "code").read_text()) if (folder.path / "code").exists() else Ending.PROCESS_LOST.code
    request = read_request(folder.run_dir, ANSWERED)
    decision = decide(
        code,
        asked=request is not None and request.requeue,
        node_lost=folder.must_end(),
        starts=starts(folder),
        step=saved_step(folder),
    )
    say(decision.why)
    if decision.again:
        (folder.path / "requeue").touch()
    return 0


PARTS: Mapping[str, Callable[[RunConfig, JobFolder], int]] = {
    "check": check,
    "choose": choose,
    "reduce": reduce,
    "node": node,
    "drive": drive,
    "decide": decide_requeue,
}


def _wait_until_ready(head: Head, folder: JobFolder) -> bool:
    """Whether Ray's head can be joined, before the job ends or `HEAD_TIMEOUT_S` pass."""
    clock = AwakeClock()
    while clock() < HEAD_TIMEOUT_S and not folder.is_over() and not folder.must_end():
        try:
            with socket.create_connection((head.address, head.ready_port), timeout=1):
                return True
        except OSError:
            time.sleep(_POLL_S)
    say(f"Ray's head does not listen at {head.address}:{head.ready_port}; see logs/{folder.nodes()[0]}/ray.log")
    return False


if __name__ == "__main__":
    sys.exit(main())
