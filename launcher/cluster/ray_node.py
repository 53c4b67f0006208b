"""Runs Ray on one node of a SLURM job, from its start until the job's folder says that the run is over.

`ray start --block` runs as a child. This process adopts every orphan below it (`PR_SET_CHILD_SUBREAPER`), so whatever
Ray started can be found and ended: nothing stays on the node, not even where SLURM has no control groups. Shared memory
and Ray's temporary folder are removed as well.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from history.index.segments_dir import sweep_segments
from history.own_files import is_private_folder, opener
from launcher.cluster.job_folder import Head, JobFolder
from launcher.cluster.node import RAY_FOLDER, RAY_SETTINGS, RAY_START_TRIES, raise_open_files
from launcher.cluster.ports import PortMap
from rollout.processes import children, send_signal
from rollout.transports.shm_files import sweep

_SET_CHILD_SUBREAPER = 36
_TMP = Path("/tmp")
_POLL_S = 0.5
END_TIMEOUT_S = 10.0
"""For which Ray's processes may end by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """What Ray is started with on this node."""

    name: str
    address: str
    interface: str
    ports: PortMap
    head: Head | None
    """None on the head node itself."""
    num_cpus: int
    """Logical CPUs, enough for every actor: the placement names the node of each."""
    num_gpus: int
    object_store_bytes: int
    labels: Mapping[str, str]
    """Topology of the node: `rack` and `block`, where known. `spare` for a spare node."""
    temp_dir: Path
    """Of this node and this job alone; see `make_temp_dir`. Short: paths of sockets have at most 107 bytes."""

    @property
    def ray_dir(self) -> Path:
        """Ray's own folder, which Ray opens to all users. They cannot enter the one around it."""
        return self.temp_dir / "ray"


def make_temp_dir(job_id: int, number: int) -> Path:
    """A new folder that only this user can enter, for node `number` of the job. Removes those of earlier starts.

    Its name is random: nobody can have made it before.
    """
    prefix = f"{RAY_FOLDER}{job_id}-{number}-"
    for earlier in filter(is_private_folder, _TMP.glob(f"{prefix}*")):
        shutil.rmtree(earlier, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_TMP))


def ray_command(node: RayNode) -> list[str]:
    """The command that starts Ray. Pure."""
    joins = ["--head", "--include-dashboard=false"] if node.head is None else []
    joins += [] if node.head is None else [f"--address={node.head.address}:{node.head.port}"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *joins),
        f"--node-ip-address={node.address}",
        f"--node-name={node.name}",
        *([f"--labels={','.join(f'{key}={value}' for key, value in node.labels.items())}"] if node.labels else []),
        *node.ports.options(head=node.head is None),
        f"--num-cpus={node.num_cpus}",
        f"--num-gpus={node.num_gpus}",
        f"--object-store-memory={node.object_store_bytes}",
        f"--temp-dir={node.ray_dir}",
        "--disable-usage-stats",
        "--log-style=record",
    ]


def topology_labels(address: str) -> dict[str, str]:
    """Labels of a node from SLURM's address of it, for example `spine.leaf3.node17`: the switch and the one above it.

    Empty without SLURM's topology plugin, whose address is the name of the node. Pure.
    """
    switches = address.split(".")[:-1]
    return dict(zip(("rack", "block"), reversed(switches), strict=False))


def ray_environment(node: RayNode) -> dict[str, str]:
    """Variables of Ray, which its workers inherit. Pure."""
    return {
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        "VLLM_HOST_IP": node.address,
        "RAY_raylet_start_wait_time_s": "120",
        **{f"RAY_{name}": json.dumps(value) for name, value in RAY_SETTINGS.items()},
        "RAY_DISABLE_IMPORT_WARNING": "1",
        **node.ports.metrics,
    }


def run_ray(node: RayNode, folder: JobFolder, *, log: Path) -> int:
    """Run Ray until the run is over, then leave nothing of it; returns 0, or 1 where Ray ended by itself.

    Ray that ends before the run has begun is started again, `RAY_START_TRIES` times in all. Afterwards a node whose Ray
    has ended tells the others, which end too where the run cannot go on without it.
    """
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ends: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        ends.append(number)

    signal.signal(signal.SIGTERM, note)
    raise_open_files()  # Ray and all processes of the run inherit it; sessions often begin with 1,024
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        for tries_left in reversed(range(RAY_START_TRIES)):
            shutil.rmtree(node.ray_dir, ignore_errors=True)  # of an earlier try
            ray = _start(node, log)
            while ray.poll() is None and not ends and not folder.is_over() and not folder.must_end():
                time.sleep(_POLL_S)
            if ray.poll() is None:
                return 0
            _keep_logs(node.ray_dir, log.parent)
            if folder.has_begun() or not tries_left:
                break
            print(f"{node.name}: Ray ended with code {ray.returncode}, see {log}; it is started again", flush=True)
            end_family()
        folder.note_lost_node(node.name)
        return 1
    finally:
        end_family()
        sweep()
        sweep_segments()
        shutil.rmtree(node.temp_dir, ignore_errors=True)


def _start(node: RayNode, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | ray_environment(node)
    with open(log, "ab", opener=opener) as output:
        return subprocess.Popen(ray_command(node), env=environment, stdout=output, stderr=subprocess.STDOUT)


def end_family() -> None:
    """End all processes below this one: by SIGTERM, after `END_TIMEOUT_S` by SIGKILL."""
    family = children(psutil.Process(), recursive=True)
    send_signal(family, signal.SIGTERM)
    psutil.wait_procs(family, timeout=END_TIMEOUT_S)
    while family := [one for one in children(psutil.Process(), recursive=True) if one.status() != psutil.STATUS_ZOMBIE]:
        send_signal(family, signal.SIGKILL)
        psutil.wait_procs(family, timeout=1)


def _keep_logs(ray_dir: Path, log_dir: Path) -> None:
    """Ray's own logs, for a person who asks why it has ended."""
    for logs in sorted(ray_dir.glob("session_2*/logs")):
        shutil.copytree(logs, log_dir / logs.parent.name, dirs_exist_ok=True)
