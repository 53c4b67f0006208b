"""State of a SLURM job that its parts read: node, number, steps of earlier starts."""

import os
import socket

from launcher.cluster.job_folder import JobFolder
from launcher.endings.kinds import Ending
from launcher.run_dir.atomic_files import left_out, readable_rows
from launcher.run_dir.checkpoints import Checkpoints


def saved_step(folder: JobFolder) -> int:
    """Step of the newest checkpoint; 0 without one."""
    checkpoints = folder.run_dir / "checkpoints"
    newest = Checkpoints(checkpoints).latest() if checkpoints.is_dir() else None
    return newest[0] if newest else 0


def starts(folder: JobFolder) -> list[int]:
    """Step of each start of the run, this one included; without starts that were refused, and without damaged rows."""
    rows, num_damaged = readable_rows(folder.starts)
    found = [(step, row) for row in rows if isinstance(step := row.get("step"), int) and "job" in row]
    for line in left_out(folder.starts, num_damaged + len(rows) - len(found)):
        say(line)
    return [step for step, row in found if not _was_refused(folder, str(row["job"]))]


def _was_refused(folder: JobFolder, job: str) -> bool:
    """Whether the run of a job was refused before it had processes, as where another job has the run directory.

    A start that has put its job back into the queue counts, so that nothing loops.
    """
    start = JobFolder(path=folder.path.parent / job, config=folder.config)
    code = start.path / "code"
    refused = code.exists() and code.read_text(encoding="utf-8").strip() == str(Ending.USER_INPUT.code)
    return refused and not start.has_begun() and not (start.path / "requeue").exists()


def node_name() -> str:
    """SLURM's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def job_id() -> int:
    """Number of the job; its ports follow from it."""
    return int(os.environ["SLURM_JOB_ID"])


def say(text: str) -> None:
    """Print a line of the job's log."""
    print(text, flush=True)
