"""`megatron-rl slurm`: renders the batch script of a run and submits it.

The run directory receives the files of the job: the script, the resolved configuration, and the versions of this
machine's packages, with which the nodes are compared. A job reads the last two at each of its starts. They lie in a
folder that is named after their content, so neither later edits of CONFIG nor another submission reach a waiting job.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.checks.check import CheckedRun
from launcher.checks.health.cpu_packages import cpu_package_problems
from launcher.checks.slurm import time_limit_s
from launcher.cluster.node import package_versions
from launcher.cluster.slurm_script import RecordedTimes, Submission, render, stop_notice_s
from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError, LaunchError
from launcher.run_dir.atomic_files import left_out, readable_rows, replace_text
from launcher.run_dir.checkpoints import WRITE, Checkpoints
from launcher.run_dir.resume import FIRST_MODEL, changed_keys, check_first_model

FOLDER, CONFIG, SCRIPT, PACKAGES = "slurm", "config.yaml", "job.sbatch", "packages.json"
SUBMIT_TIMEOUT_S = 120.0
_EVALUATE = "evaluate"
"""Activity of the spans of `megatron_rl.controller.phases.Phases.evaluate`."""


def job_config(config: RunConfig) -> RunConfig:
    """The configuration of the run in its job: it joins the Ray cluster of the job's nodes. Pure.

    Raises:
        ConfigError: `cluster.address` names another Ray cluster.
    """
    cluster = config.cluster
    if cluster.address != "local":
        raise ConfigError(
            f"`cluster.address` = {cluster.address}: a SLURM job starts Ray on its own nodes; leave the key out, or "
            "start `megatron-rl run` to join that cluster"
        )
    num_nodes = cluster.slurm.nodes
    joined = cluster.model_copy(update={"address": "auto", "min_nodes": num_nodes, "max_nodes": num_nodes})
    return config.model_copy(update={"run_dir": str(Path(config.run_dir).absolute()), "cluster": joined})


def check_resume(config: RunConfig) -> None:
    """Refuse a job that its run would refuse, because it resumes another run. Only reads; a first start passes.

    Raises:
        RunDirectoryError: the run directory has a checkpoint, and a key that must not change or the first weights have
            changed, or that checkpoint is gone.
    """
    run_dir = Path(config.run_dir)
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir() or Checkpoints(checkpoints).latest() is None:
        return
    changed_keys(run_dir, config)
    if (run_dir / FIRST_MODEL).exists():  # the check writes the file where it is missing
        check_first_model(run_dir, Path(config.model), resumes=True)


def prepare(config: RunConfig) -> tuple[Submission, str]:
    """Facts of the submission, and the batch script; `config` is that of `job_config`."""
    run_dir = Path(config.run_dir)
    slurm = config.cluster.slurm
    notice_s = stop_notice_s(
        recorded_times(run_dir),
        asked_s=slurm.stop_before_s,
        limit_s=time_limit_s(slurm.time) if slurm.time else None,
    )
    submission = Submission(
        run_dir=run_dir,
        config=run_dir / FOLDER / f"submission-{_digest(_inputs(config))}" / CONFIG,
        work_dir=Path.cwd(),
        python=sys.executable,
        stop_before_s=notice_s,
        environment=config.reward.environment,
    )
    return submission, render(slurm, submission)


def _inputs(config: RunConfig) -> dict[str, str]:
    """Texts of the files that a job reads, by name. A container brings packages of its own."""
    texts = {CONFIG: resolved_yaml(config)}
    if config.cluster.slurm.container.kind == "none":
        texts[PACKAGES] = json.dumps(package_versions()) + "\n"
    return texts


def _digest(texts: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=6).hexdigest()


def recorded_times(run_dir: Path) -> RecordedTimes:
    """Seconds that earlier starts of the run have recorded.

    A save ends after the metrics of its step are written, so its time is read from the spans of `events.jsonl`: from
    its begin to its last file.
    """
    spans: dict[object, list[float]] = defaultdict(list)
    for row in _recorded(run_dir / "events.jsonl"):
        start_s, end_s, activity = (row.get(key) for key in ("start_s", "end_s", "activity"))
        if isinstance(start_s, int | float) and isinstance(end_s, int | float) and isinstance(activity, str):
            spans[activity].append(end_s - start_s)
    steps_s = [row.get("timing_s/step") for row in _recorded(run_dir / "metrics.jsonl")]
    return RecordedTimes(
        steps_s=[float(step_s) for step_s in steps_s if isinstance(step_s, int | float)],
        saves_s=spans[WRITE],
        evaluations_s=spans[_EVALUATE],
    )


def _recorded(path: Path) -> list[dict[str, object]]:
    """Rows of a record; a warning says how many lines are damaged."""
    rows, num_damaged = readable_rows(path)
    for line in left_out(path, num_damaged):
        print(f"warning: {line}", file=sys.stderr)
    return rows


def dry_run_lines(checked: CheckedRun, script: str) -> list[str]:
    """The script, the placement and the memory plan."""
    slurm = checked.config.cluster.slurm
    return [
        script,
        f"# placement ({slurm.nodes} node(s); planned again for the nodes of the job)",
        *checked.placement.lines(),
        "",
        "# memory (estimate; checked again on the nodes when the job starts)",
        *checked.memory.lines(),
    ]


def submit(config: RunConfig, submission: Submission, script: str) -> list[str]:
    """Save the job's files and submit the script; returns lines for the person: the job's id, the path of its log.

    Raises:
        LaunchError: there is no sbatch, or it refuses the script; its own words are in the message.
        ConfigError: the job has GPUs, and the packages of this environment, which the job takes, are for CPUs.
    """
    slurm = config.cluster.slurm
    gpus = f"`cluster.slurm.gpus_per_node` = {slurm.gpus_per_node}"
    problems = cpu_package_problems(gpus, package_versions(), "name a container (`cluster.slurm.container`)")
    if slurm.gpus_per_node and slurm.container.kind == "none" and problems:
        raise ConfigError(problems[0])
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            "sbatch is not on PATH: submit from a login node of the cluster, or print the script: --dry-run"
        )
    folder = submission.run_dir / FOLDER
    for needed in (submission.config.parent, submission.run_dir / "logs"):
        needed.mkdir(parents=True, exist_ok=True)
    for name, text in _inputs(config).items():
        replace_text(submission.config.parent / name, text)
    replace_text(folder / SCRIPT, script)  # SLURM copies it
    job = _sbatch([sbatch, "--parsable", str(folder / SCRIPT)])
    return [f"job {job}", f"log: {str(submission.log).replace('%j', job)}"]


def _sbatch(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"sbatch did not answer within {SUBMIT_TIMEOUT_S:.0f} s; is SLURM's controller up?"
        ) from error
    if done.returncode:
        raise LaunchError(f"sbatch refused {command[-1]}: {done.stderr.strip()}; correct that key of `cluster.slurm`")
    return done.stdout.strip().partition(";")[0]
