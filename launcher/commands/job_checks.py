"""Checks of a SLURM job's nodes before Ray starts: parts `check`, `choose` and `reduce` of `slurm_job`."""

import json
import time
from dataclasses import asdict
from pathlib import Path

from history.patience import AwakeClock
from launcher.cluster.addresses import interfaces, node_address, resolve
from launcher.cluster.health import NodeNeeds, choose_nodes, node_facts, node_needs, node_problems, other_copies
from launcher.cluster.job_folder import JobFolder
from launcher.cluster.pairs import Endpoint, reduce_over_nodes, unreachable_nodes
from launcher.cluster.ports import free_ports
from launcher.commands.job_state import job_id, node_name, saved_step, say, starts
from launcher.commands.requeue import MAX_REQUEUES, may_start
from launcher.commands.slurm import PACKAGES
from launcher.config.schema import RunConfig
from launcher.endings.kinds import Ending
from launcher.errors import RunInUseError
from launcher.run_dir.atomic_files import append_line, drop_torn_line, replace_text
from launcher.run_dir.run_lock import WATCH_S, RunLock
from rollout.failures import DeadlineError

PAIRS_TIMEOUT_S = 30.0
"""For which a node waits for the others before it tries to reach them."""
REDUCE_TIMEOUT_S = 600.0
"""Of the all-reduce over nodes. Nodes import torch first, some from a cold cache of a busy file system. The sum itself
has half of the time."""
LOCK_TIMEOUT_S = 180.0
"""For which a job waits for the lock of the run directory. File servers keep the lock of a dead node for up to two
minutes, and SLURM may requeue its job sooner."""
_POLL_S = 0.5


def check(config: RunConfig, folder: JobFolder) -> int:
    """Write the facts of this node, its problems and the nodes that it cannot reach."""
    node, allocated = node_name(), (folder.path / "allocated").read_text(encoding="utf-8").split()
    needs = _needs(config, folder)
    facts = node_facts(needs, folder.path / "checks" / f"{node}.canary")
    problems, unreachable = node_problems(facts, needs), list[str]()
    try:
        address, _ = node_address(node, config.cluster.slurm, present=interfaces(), resolved=resolve(node))
        here = Endpoint(node=node, address=address, port=free_ports(job_id()).probe)
        unreachable = unreachable_nodes(folder.path / "pairs", here, allocated, timeout_s=PAIRS_TIMEOUT_S)
    except ValueError as error:  # no address, or no free ports: this node is unhealthy, the others go on
        problems.append(str(error))
    record = {**asdict(facts), "packages": dict(facts.packages), "problems": problems, "unreachable": unreachable}
    replace_text(folder.check_file(node), json.dumps(record) + "\n")
    return 1 if problems else 0


def refuse_in_use(run_dir: Path, *, timeout_s: float) -> None:
    """Refuse a job of a run that is under way, before the job counts as a start.

    Args:
        run_dir: run directory; it may not exist yet.
        timeout_s: how long to wait for the end of that run.

    Raises:
        RunInUseError: another process has the run directory's lock; names the process.
        RunDirectoryError: the file system has no locks.
    """
    clock, is_first = AwakeClock(pause_s=2 * WATCH_S), True  # a try may watch another node's run
    while run_dir.is_dir():
        try:
            RunLock(run_dir / "LOCK").release()
            return
        except RunInUseError as error:
            if clock() >= timeout_s:
                raise
            if is_first:
                say(f"{error}. Waits for {timeout_s:.0f} s")
            is_first = False
        time.sleep(_POLL_S)


def choose(config: RunConfig, folder: JobFolder) -> int:
    """Name the nodes of the run and its spare nodes; the first one becomes Ray's head.

    Raises:
        RunInUseError: another run has the run directory.
    """
    refuse_in_use(folder.run_dir, timeout_s=LOCK_TIMEOUT_S)
    slurm = config.cluster.slurm
    allocated = (folder.path / "allocated").read_text(encoding="utf-8").split()
    records = {node: _read(folder.check_file(node)) for node in allocated if folder.check_file(node).exists()}
    problems = {node: [str(one) for one in _list(record["problems"])] for node, record in records.items()}
    models = {node: _mapping(record["model_files"]) for node, record in records.items() if not problems[node]}
    for node, problem in other_copies(models).items():
        problems[node].append(problem)
    unreachable = {node: [str(one) for one in _list(record["unreachable"])] for node, record in records.items()}
    choice = choose_nodes(allocated, problems, num_nodes=slurm.nodes, unreachable=unreachable)
    for line in choice.left_out:
        say(f"left out: {line}")
    if not choice.nodes:
        healthy = len(allocated) - len(choice.left_out)
        say(
            f"{healthy} of {len(allocated)} nodes are healthy, `cluster.slurm.nodes` = {slurm.nodes} are needed; mend "
            "the nodes named above, or raise `cluster.slurm.spares`"
        )
        return Ending.USER_INPUT.code
    step = saved_step(folder)
    if not may_start(starts(folder), step):
        say(f"{MAX_REQUEUES + 1} starts at step {step} made no new step; to try again remove {folder.starts}")
        return Ending.PROCESS_LOST.code
    drop_torn_line(folder.starts)
    append_line(folder.starts, {"step": step, "time_s": time.time(), "job": folder.path.name})
    if choice.spares:
        say(f"spare: {', '.join(choice.spares)}")
    nodes = (*choice.nodes, *choice.spares)
    replace_text(folder.path / "nodes", "".join(f"{node}\n" for node in nodes))
    return 0


def reduce(config: RunConfig, folder: JobFolder) -> int:
    """Sum a number over all chosen nodes; names the nodes that did not take part."""
    name, nodes = node_name(), folder.nodes()
    address, interface = node_address(name, config.cluster.slurm, present=interfaces(), resolved=resolve(name))
    first = folder.path / "rendezvous"
    if name == nodes[0]:
        replace_text(first, f"{address} {free_ports(job_id()).rendezvous}\n")
    clock = AwakeClock()
    while not first.exists():
        if clock() > REDUCE_TIMEOUT_S:
            raise DeadlineError(f"{name} waited {REDUCE_TIMEOUT_S:.0f} s for {nodes[0]} to begin the all-reduce")
        time.sleep(_POLL_S)
    line = reduce_over_nodes(name, nodes, first.read_text(encoding="utf-8").split(), interface, REDUCE_TIMEOUT_S)
    if name == nodes[0]:
        say(line)
    return 0


def _needs(config: RunConfig, folder: JobFolder) -> NodeNeeds:
    listed = folder.config.parent / PACKAGES  # absent where a container brings its own packages
    versions = {name: str(version) for name, version in _read(listed).items()} if listed.exists() else {}
    return node_needs(config, versions)


def _read(path: Path) -> dict[str, object]:
    row: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return row


def _mapping(value: object) -> dict[str, str]:
    assert isinstance(value, dict)
    return value


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
