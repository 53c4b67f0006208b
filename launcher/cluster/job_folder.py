"""Files by which the parts of a SLURM job find each other: `slurm/JOB.RESTART/` in the run directory.

    token        Ray's token, mode 600
    checks/NODE.json    facts of a node and its problems
    pairs/NODE.address  where a node listens while nodes try to reach each other
    pairs/NODE.done     the nodes that this one has waited for and tried to reach
    rendezvous   address and port of the all-reduce over nodes
    allocated    names of all nodes of the job, a line each
    nodes        names of the nodes with Ray, a line each: Ray's head, the others of the run, spare nodes
    phases       begin of each phase before the run, a line each
    head.json    address and port of Ray's head
    over         the run has ended: every node ends Ray
    lost/NODE    a node ended Ray before the run had ended
    node_lost    the same without its name: the job ends
    begun        the run has started its processes; from now on it decides what the loss of another node means
    code         exit code of the run
    requeue      the job goes back into the queue

A step that a person starts has the folder `slurm/JOB.RESTART.STEP/`. Beside these folders, `slurm/starts.jsonl` has a
row for each start of the run, and `slurm/submission-DIGEST/` what the jobs of one submission read.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from history.patience import AwakeClock
from launcher.run_dir.atomic_files import replace_text
from rollout.failures import DeadlineError

VARIABLE = "MEGATRON_RL_JOB_DIR"
"""Environment variable with the folder; the batch script sets it."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where Ray's head listens."""

    address: str
    """IPv4 address."""
    port: int
    """Of the head service."""
    ready_port: int
    """Ray's raylet on the head node; once it listens, nodes and the driver can join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFolder:
    """The folder of one start of a job."""

    path: Path
    config: Path
    """The configuration of the job. The versions of the packages lie beside it, unless a container brings its own."""

    @classmethod
    def of_this_job(cls, config: Path) -> "JobFolder":
        """The folder of the job that this process belongs to.

        Raises:
            RuntimeError: this process belongs to no job.
        """
        folder = os.environ.get(VARIABLE)
        if not folder:
            raise RuntimeError(
                f"{VARIABLE} is not set: this command is started by the batch script of `megatron-rl slurm`"
            )
        return cls(path=Path(folder), config=config)

    @property
    def run_dir(self) -> Path:
        """Run directory of the job."""
        return self.path.parent.parent

    @property
    def starts(self) -> Path:
        """Rows `{"step": N, "job": NAME}` of all starts of the run; NAME is that of the start's folder."""
        return self.path.parent / "starts.jsonl"

    @property
    def phases(self) -> Path:
        """Begins of the phases before the run (`launcher.run_dir.start_phases`)."""
        return self.path / "phases"

    def check_file(self, node: str) -> Path:
        """Record of the checks of a node."""
        return self.path / "checks" / f"{node}.json"

    def nodes(self) -> list[str]:
        """Nodes with Ray: its head, the other nodes of the run, spare nodes."""
        return (self.path / "nodes").read_text(encoding="utf-8").split()

    def is_over(self) -> bool:
        """Whether the run has ended. Files that cannot be looked at for a moment have not changed."""
        with suppress(OSError):
            return (self.path / "over").exists()
        return False

    def must_end(self) -> bool:
        """Whether nodes ended Ray before the run had ended, and the run cannot go on without them.

        It cannot without Ray's head. What the loss of another node means, a run that has begun decides itself. A file
        system that fails for a moment, as while its client reconnects, ends nothing: callers ask again.
        """
        with suppress(OSError):
            return self._must_end()
        return False

    def _must_end(self) -> bool:
        lost = [path.name for path in (self.path / "lost").glob("*")]
        if (self.path / "node_lost").exists() or self._head_name() in lost:
            return True
        return bool(lost) and not self.has_begun()

    def has_begun(self) -> bool:
        """Whether the run has started its processes."""
        return (self.path / "begun").exists()

    def note_lost_node(self, node: str = "") -> None:
        """A node has ended Ray: the others end, too, where they must. Without a name they all do."""
        if node:
            (self.path / "lost").mkdir(exist_ok=True)
        (self.path / "lost" / node if node else self.path / "node_lost").touch()

    def _head_name(self) -> str:
        path = self.path / "nodes"
        return path.read_text(encoding="utf-8").split()[0] if path.exists() else ""

    def write_head(self, head: Head) -> None:
        """Tell the other nodes where the head listens."""
        replace_text(self.path / "head.json", json.dumps(asdict(head)) + "\n")

    def wait_for(self, paths: Sequence[Path], timeout_s: float, complaint: str) -> bool:
        """Wait for files that other parts of the job write; False if the run has ended before.

        Raises:
            DeadlineError: a file is still missing after `timeout_s`; its text ends with `complaint`.
        """
        clock = AwakeClock()
        while missing := [path for path in paths if not path.exists()]:
            if self.is_over() or self.must_end():
                return False
            if clock() > timeout_s:
                raise DeadlineError(f"waited {timeout_s:.0f} s for {missing[0]}: {complaint}")
            time.sleep(_POLL_S)
        return True

    def wait_for_head(self, timeout_s: float) -> Head | None:
        """Where the head listens; None if the run has ended before.

        Raises:
            DeadlineError: the head has not said so after `timeout_s`.
        """
        path = self.path / "head.json"
        if not self.wait_for([path], timeout_s, "Ray's head node has not started; see its log"):
            return None
        row = json.loads(path.read_text(encoding="utf-8"))
        return Head(address=str(row["address"]), port=int(row["port"]), ready_port=int(row["ready_port"]))


def note_begin() -> None:
    """The run of this process has started its processes; nothing outside a SLURM job."""
    if folder := os.environ.get(VARIABLE):
        (Path(folder) / "begun").touch()
