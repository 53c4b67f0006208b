"""A real SLURM cluster: slurmctld and N slurmd on this machine, each in namespaces of its own.

Every node has its network address, host name, processes and `/dev/shm`; the file system is shared, as on a cluster.
`nsenter` enters the network namespace and not `ip netns exec`, which hides `/sys/fs/cgroup` from slurmd. Needs root.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.cluster.slurm_config import LOGIN, addresses, hosts, node_names, slurm_conf
from tests.support.deadline import DEADLINE_S

SWITCH = "mrl-switch"
SHM = "4g"
UP_TIMEOUT_S = 120.0
SLURMD_PORT = "6818"
_PRIVATE = ["--mount", "--uts", "--propagation", "private"]


def _netns(node: str) -> str:
    return f"mrl-{node}"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A socket that listens."""

    host: str
    """Address, or the wildcard of all interfaces."""
    port: int
    process: str
    """First 15 letters of the process' name."""


@dataclass(slots=True)
class SlurmCluster:
    """A cluster whose files are under `root`; use `slurm_cluster`, which ends it."""

    root: Path
    num_nodes: int
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes that run jobs."""
        return node_names(self.num_nodes)

    def up(self) -> None:
        """Start network, munge, slurmctld and all nodes; returns when all are idle."""
        for folder in ("spool", "log", "state", "munge"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "hosts").write_text(hosts(self.num_nodes))
        (self.root / "slurm.conf").write_text(slurm_conf(self.root, self.num_nodes))
        self._network()
        self._munge()
        self._daemon(LOGIN, ["slurmctld", "-D"], own_processes=False)
        for node in self.nodes:
            self.boot(node)
        deadline = time.monotonic() + UP_TIMEOUT_S
        while self.login("sinfo", "-h", "-o", "%T %D", check=False).strip() != f"idle {self.num_nodes}":
            assert time.monotonic() < deadline, f"nodes do not come up; see {self.root}/log"
            time.sleep(0.5)

    def boot(self, node: str) -> None:
        """Start a node: again, if it has been killed."""
        self._daemon(node, ["slurmd", "-D", "-N", node], own_processes=True)

    def login(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Output of a command on the login node: sinfo, sbatch, megatron-rl."""
        inside = ["nsenter", f"--net=/run/netns/{_netns(LOGIN)}", "unshare", *_PRIVATE]
        return self._output([*inside, "sh", "-c", self._enter(LOGIN), "sh", *command], check=check, cwd=cwd)

    def on(self, node: str, *command: str, check: bool = True) -> str:
        """Output of a command on a node, beside its jobs."""
        inside = ["nsenter", "-t", str(self._init(node).pid), "--net", "--mount", "--uts", "--pid"]
        return self._output([*inside, *command], check=check)

    def kill(self, node: str) -> None:
        """A node dies: all its processes at once."""
        self._init(node).kill()
        self.daemons.pop(node).wait()

    def cut(self, node: str) -> None:
        """The node's network is cut; its processes go on."""
        _run("ip", "-n", SWITCH, "link", "set", f"v{node}", "down")

    def mend(self, node: str) -> None:
        """The network of a cut node works again."""
        _run("ip", "-n", SWITCH, "link", "set", f"v{node}", "up")

    def listening(self, node: str) -> list[Listening]:
        """Sockets of the node that listen for other machines, without slurmd's."""
        rows = [line.split() for line in self.on(node, "ss", "-Htlnp").splitlines()]
        found = []
        for row in rows:
            host, _, port = row[3].rpartition(":")
            process = row[5].split('"')[1] if len(row) > 5 else ""
            if not host.startswith(("127.", "[::1]")) and port != SLURMD_PORT:
                found.append(Listening(host=host, port=int(port), process=process))
        return found

    def down(self) -> None:
        """End everything, also of a cluster that came up in part."""
        for name in [LOGIN, *self.nodes]:
            listed = subprocess.run(["ip", "netns", "pids", _netns(name)], capture_output=True, text=True, check=False)
            for pid in listed.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        for name in [*map(_netns, [LOGIN, *self.nodes]), SWITCH]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _network(self) -> None:
        _run("ip", "netns", "add", SWITCH)
        _run("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", SWITCH, "link", "set", "br0", "up")
        for node, address in addresses(self.num_nodes).items():
            name = _netns(node)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", f"v{node}", "netns", SWITCH)
            _run("ip", "-n", SWITCH, "link", "set", f"v{node}", "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def _munge(self) -> None:
        """A munged of the cluster's own; in the login node's network, so that `down` finds it in any case."""
        folder = self.root / "munge"
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        files = [f"--{name}={folder}/{file}" for name, file in _MUNGE.items()]
        with (self.root / "log" / "munged.out").open("wb") as output:
            self.daemons["munged"] = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{_netns(LOGIN)}", _program("munged"), "--foreground", "--force", *files],
                stdout=output,
                stderr=output,
            )

    def _daemon(self, node: str, command: Sequence[str], *, own_processes: bool) -> None:
        own = ["--pid", "--fork", "--mount-proc", "--kill-child"] if own_processes else []
        shm = f"mount -t tmpfs -o size={SHM} tmpfs /dev/shm && " if own_processes else ""
        inside = ["nsenter", f"--net=/run/netns/{_netns(node)}", "unshare", *_PRIVATE, *own]
        program = [_program(command[0]), *command[1:], "-f", f"{self.root}/slurm.conf"]
        with (self.root / "log" / f"{node}.out").open("wb") as output:
            self.daemons[node] = subprocess.Popen(
                [*inside, "sh", "-c", shm + self._enter(node), "sh", *program],
                env=self._environment(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _enter(self, node: str) -> str:
        """Shell commands that make a namespace the node's, and then become what follows."""
        return f'hostname {node} && mount --bind {self.root}/hosts /etc/hosts && exec "$@"'

    def _init(self, node: str) -> psutil.Process:
        """Process 1 of a node, slurmd."""
        (init,) = psutil.Process(self.daemons[node].pid).children()
        return init

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": f"{self.root}/slurm.conf"}

    def _output(self, command: Sequence[str], *, check: bool, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, env=self._environment(), cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


_MUNGE = {
    "socket": "socket",
    "key-file": "key",
    "pid-file": "munged.pid",
    "log-file": "munged.log",
    "seed-file": "seed",
}


def _program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert found, f"there is no {name}: run `make test-cluster` as root"
    return found


@contextmanager
def slurm_cluster(root: Path, num_nodes: int) -> Iterator[SlurmCluster]:
    """A cluster for the body, once no other session of this machine has one: namespaces have fixed names."""
    cluster = SlurmCluster(root, num_nodes)
    with (Path(tempfile.gettempdir()) / "mrl-test-cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster.down()  # of a session that was killed
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()
