"""Checks of one node before anything loads: what it sees and what it has free, against what the job needs.

`node_facts` reads this node, `node_problems` judges the facts; the second is pure. A problem names the value, the bound
and the fix. The clock is compared with that of the file server, through the time of a file that the node has just
written; on one file server all nodes are then within twice `MAX_SKEW_S` of each other. Times in whole seconds, as on
Lustre and BeeGFS, add two seconds to that.

Each process of a run reads the model from its own node. Nothing later would show that a node has another copy, for
example with another rotary base. So the files are compared over the nodes (`other_copies`).
"""

import hashlib
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from history.own_files import opener
from launcher.cluster.node import NodeResources, command_output, node_resources, package_versions, raise_open_files
from launcher.config.schema import RunConfig

MAX_SKEW_S = 0.5
MIN_DISK_BYTES = 1 << 30
MIN_OPEN_FILES = 4096
_WEIGHTS = ".safetensors"
_MODEL_FILES = {".json", ".jinja", ".txt", ".model", _WEIGHTS}
"""Suffixes of the files in a model's folder that processes of a run read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds:
    """What the job needs on every node."""

    paths: tuple[str, ...]
    """Files and folders that must be readable."""
    models: tuple[str, ...]
    """Those of them that are folders of models."""
    packages: Mapping[str, str]
    """Versions of the submitting machine; empty where a container brings its own."""
    num_gpus: int | None
    """GPUs that a process of the run sees there; None if any number will do."""
    shm_bytes: int
    """Free bytes in `/dev/shm`."""
    temp_dir: str


def node_needs(config: RunConfig, packages: Mapping[str, str]) -> NodeNeeds:
    """What a run needs on every node; `packages` are the versions that the node must have."""
    sets = config.evaluation.sets.values()
    models = tuple(filter(None, (config.model, config.trainer.critic.model)))
    return NodeNeeds(
        models=models,
        paths=(*models, *(data.path for data in config.data.train), *(one.path for one in sets)),
        packages=packages,
        num_gpus=config.cluster.slurm.gpus_per_node,
        shm_bytes=config.cluster.object_store_bytes,
        temp_dir="/tmp",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node has."""

    node: str
    unreadable: tuple[str, ...]
    model_files: Mapping[str, str]
    """By path, the hash of each file that a run reads of its models; the size of weights, which take long to read."""
    packages: Mapping[str, str]
    num_gpus: int
    gpu_processes: tuple[str, ...]
    """Process id and name of each process on a GPU that this process may use."""
    shm_bytes: int
    disk_bytes: int
    open_files: int
    """Soft limit, after it was raised to the hard one."""
    clock_skew_s: float
    """Clock of the node minus clock of the file server."""


def node_facts(needs: NodeNeeds, canary: Path) -> NodeFacts:
    """Facts of this node; `canary` is a file in the run directory that is written here."""
    canary.parent.mkdir(parents=True, exist_ok=True)
    begun_s = time.time()
    with open(canary, "w", encoding="utf-8", opener=opener) as file:
        file.write(socket.gethostname())
    written_ns, ended_s = canary.stat().st_mtime_ns, time.time()
    resolution_s = 0.0 if written_ns % 10**9 else 1.0  # Lustre and BeeGFS keep whole seconds
    skew_s = clock_difference_s(begun_s, written_ns / 1e9, ended_s, resolution_s=resolution_s)
    resources = node_resources()
    return NodeFacts(
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        unreadable=tuple(path for path in needs.paths if not os.access(path, os.R_OK)),
        model_files=_model_files(needs.models),
        packages=package_versions(),
        num_gpus=len(resources.gpu_bytes),
        gpu_processes=_gpu_processes(resources),
        shm_bytes=shutil.disk_usage("/dev/shm").free,
        disk_bytes=shutil.disk_usage(needs.temp_dir).free,
        open_files=raise_open_files(),
        clock_skew_s=skew_s,
    )


def _model_files(models: Sequence[str]) -> dict[str, str]:
    folders = [Path(model) for model in models if os.access(model, os.R_OK)]
    files = [path for folder in folders for path in folder.iterdir() if path.suffix in _MODEL_FILES and path.is_file()]
    return {str(path): _content(path) for path in files}


def _content(path: Path) -> str:
    if not os.access(path, os.R_OK):
        return "cannot be read"
    if path.suffix == _WEIGHTS:
        return f"{path.stat().st_size} bytes"
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _gpu_processes(resources: NodeResources) -> tuple[str, ...]:
    if not resources.gpu_bytes:
        return ()
    visible = [f"--id={','.join(resources.gpu_ids)}"] if resources.gpu_ids else []
    query = ["--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    listed = command_output(["nvidia-smi", *visible, *query])
    return tuple(line.strip() for line in listed.splitlines() if line.strip())


def clock_difference_s(begun_s: float, written_s: float, ended_s: float, *, resolution_s: float = 0.0) -> float:
    """The least difference of two clocks that explains when a file was written: 0 between begin and end. Pure.

    A slow file system is no wrong clock.

    Args:
        begun_s: seconds by the clock of the node before the file is written.
        written_s: seconds by the clock of the file server, rounded down to `resolution_s`.
        ended_s: seconds by the clock of the node after the file was written.
        resolution_s: seconds between two times that the file server can keep; 0 if it keeps every time.
    """
    return ended_s - written_s if written_s > ended_s else max(begun_s - written_s - resolution_s, 0.0)


def node_problems(facts: NodeFacts, needs: NodeNeeds) -> list[str]:
    """Why a node cannot take part, a sentence each; none for a healthy node."""
    return [problem for problems in problems_by_subject(facts, needs).values() for problem in problems]


def problems_by_subject(facts: NodeFacts, needs: NodeNeeds) -> dict[str, list[str]]:
    """Problems of a node by subject; a healthy subject has an empty list."""
    packages = [
        f"{name} is {facts.packages.get(name) or 'missing'}, but {version} where the job was submitted; install it"
        for name, version in needs.packages.items()
        if facts.packages.get(name) != version
    ]
    gpus = []
    if needs.num_gpus is not None and facts.num_gpus != needs.num_gpus:
        gpus.append(
            f"{facts.num_gpus} GPU(s), but `cluster.slurm.gpus_per_node` = {needs.num_gpus}; set it to "
            f"{facts.num_gpus}, or use nodes with {needs.num_gpus}"
        )
    if facts.gpu_processes:
        gpus.append(f"other processes use its GPUs: {', '.join(facts.gpu_processes[:4])}; end them")
    shm = f"/dev/shm has {facts.shm_bytes} bytes free, {needs.shm_bytes} are needed; enlarge or empty it"
    disk = f"{needs.temp_dir} has {facts.disk_bytes} bytes free, {MIN_DISK_BYTES} are needed; empty it"
    files = f"{facts.open_files} open files allowed, {MIN_OPEN_FILES} are needed; raise `ulimit -n`"
    clock = f"its clock is {facts.clock_skew_s:+.1f} s off the file server's, {MAX_SKEW_S} s are allowed; set it"
    return {
        "files": [
            f"cannot read {path}; mount it there, or name a path that every node sees" for path in facts.unreadable
        ],
        "packages": packages,
        "GPUs": gpus,
        "shared memory": [shm] if facts.shm_bytes < needs.shm_bytes else [],
        "temporary disk": [disk] if facts.disk_bytes < MIN_DISK_BYTES else [],
        "open files": [files] if facts.open_files < MIN_OPEN_FILES else [],
        "clock": [clock] if abs(facts.clock_skew_s) > MAX_SKEW_S else [],
    }


def other_copies(model_files: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """By node, the problem of one whose models differ from those of most nodes, or of the first of as many. Pure."""
    copies = {node: frozenset(files.items()) for node, files in model_files.items()}
    if not copies:
        return {}
    ((usual, _),) = Counter(copies.values()).most_common(1)
    example = next(node for node, copy in copies.items() if copy == usual)
    differing = {node: sorted({path for path, _ in copy ^ usual}) for node, copy in copies.items() if copy != usual}
    return {
        node: f"has other contents than {example} in {', '.join(paths[:3])}{' and more' if len(paths) > 3 else ''}; "
        "copy the model there again, or name a path that every node sees"
        for node, paths in differing.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Nodes of a run."""

    nodes: tuple[str, ...]
    """Empty where too few are healthy."""
    spares: tuple[str, ...]
    """Healthy nodes that replace those of the run that die."""
    left_out: tuple[str, ...]
    """A line for each unhealthy node: its name and its problems."""


def choose_nodes(
    allocated: Sequence[str],
    problems: Mapping[str, Sequence[str]],
    *,
    num_nodes: int,
    unreachable: Mapping[str, Sequence[str]] | None = None,
) -> Choice:
    """The first `num_nodes` healthy nodes of the allocation that all reach each other. Pure.

    Args:
        allocated: node names in SLURM's order.
        problems: problems of each node that has written its record; a node without one does not see the run directory.
        num_nodes: nodes that the run uses.
        unreachable: nodes that each node could not connect to.
    """
    silent = ["has written no record: it does not see the run directory, or its check failed (see the job's log)"]
    by_node = {node: list(problems.get(node, silent)) for node in allocated}
    healthy = [node for node in allocated if not by_node[node]]
    pairs = {frozenset((node, other)) for node, others in (unreachable or {}).items() for other in others}
    while broken := [pair for pair in pairs if pair <= set(healthy)]:
        worst = max(healthy, key=lambda node: (sum(node in pair for pair in broken), healthy.index(node)))
        others = [other for other in allocated if other != worst and frozenset((worst, other)) in broken]
        by_node[worst].append(
            f"cannot connect to {', '.join(others) or 'itself'}, or is not reached from there; open the network "
            "between them, or set `cluster.slurm.interface`"
        )
        healthy.remove(worst)
    enough = len(healthy) >= num_nodes
    return Choice(
        nodes=tuple(healthy[:num_nodes]) if enough else (),
        spares=tuple(healthy[num_nodes:]) if enough else (),
        left_out=tuple(f"{node}: {'; '.join(found)}" for node, found in by_node.items() if found),
    )
