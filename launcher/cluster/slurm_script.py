"""Renders the batch script of a run from a template. Pure, except that the template is read.

The template is `templates/slurm.sh`, or the copy that `cluster.slurm.template` names. Invariant: every value in the
script is quoted for the shell, and no value of an environment variable enters it.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from launcher.config.slurm import ContainerConfig, SlurmConfig
from launcher.errors import ConfigError

ALWAYS_EXPORTED = ("PATH", "HOME", "USER", "LANG", "LD_LIBRARY_PATH")
DEFAULT_STOP_S = 600
"""Notice of a stop before any step was measured."""
MIN_STOP_S = 60
_RECENT = 20
_WORD = re.compile(r"@@([A-Z_]+)@@")
_GRES = re.compile(r"""--gres[=\s]\s*["']?([^"']*)["']?""")
_GPUS = re.compile(r"(?:gres[:/])?gpu(?::[^:]+)??(?::(\d+))?")
"""An entry of `--gres`: `gpu`, `gpu:COUNT`, `gpu:TYPE` or `gpu:TYPE:COUNT`; without a count it requests one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Facts of one submission. All paths are absolute."""

    run_dir: Path
    config: Path
    """The resolved configuration, saved in a folder of the run directory that no other submission changes."""
    work_dir: Path
    """Directory of the command; relative paths of the configuration are relative to it."""
    python: str
    """Interpreter that has the package installed; the container's own is used instead where there is a container."""
    stop_before_s: int
    environment: Sequence[str] = ()
    """Names of variables that the run needs, besides those of `cluster.slurm.environment`."""

    @property
    def log(self) -> Path:
        """Output of the job; `%j` is its id."""
        return self.run_dir / "logs" / "slurm-%j.out"


def render(slurm: SlurmConfig, submission: Submission) -> str:
    """The batch script.

    Raises:
        ConfigError: the template cannot be read, has unknown words, or lacks one.
    """
    values = {
        "SBATCH": "\n".join(f"#SBATCH {option}" for option in _options(slurm, submission)),
        "RUN_DIR": shlex.quote(str(submission.run_dir)),
        "CONFIG": shlex.quote(str(submission.config)),
        "PYTHON": shlex.join(_python(slurm.container, submission)),
        "SRUN_OPTIONS": _srun_options(slurm.container, submission),
        "WORK_DIR": shlex.quote(str(submission.work_dir)),
        "SETUP": "\n".join(f"module load {shlex.quote(name)}" for name in slurm.modules),
    }
    return fill(_template(slurm.template), values, name=slurm.template or "the template of the package")


def fill(template: str, values: Mapping[str, str], *, name: str) -> str:
    """Replace every `@@WORD@@`; `name` names the template in errors."""
    present = set(_WORD.findall(template))
    if unknown := sorted(present - values.keys()):
        raise ConfigError(f"{name}: unknown word(s) {', '.join(unknown)}; known are {', '.join(sorted(values))}")
    if missing := sorted(values.keys() - present):
        raise ConfigError(f"{name}: lacks @@{missing[0]}@@; copy launcher/cluster/templates/slurm.sh again")
    return re.sub(r"\n{3,}", "\n\n", _WORD.sub(lambda match: values[match[1]], template))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTimes:
    """Seconds that earlier starts of a run have recorded."""

    steps_s: Sequence[float] = ()
    """Of each step."""
    saves_s: Sequence[float] = ()
    """Of each save, to its last file."""
    evaluations_s: Sequence[float] = ()
    """Of each evaluation; a step's own seconds do not hold the one after it."""


def stop_notice_s(recorded: RecordedTimes, *, asked_s: int, limit_s: int | None) -> int:
    """Seconds before the time limit at which the run is asked to stop.

    A request ends a rollout at once, but not training, publishing, an evaluation or a save. So the notice is the
    longest recent step and evaluation plus twice the longest recent save, and `MIN_STOP_S` for the way of the signal.
    It is at most half the time limit.

    Args:
        recorded: by the starts of the run so far.
        asked_s: `cluster.slurm.stop_before_s`; 0 leaves it to the measurement.
        limit_s: the time limit; None without one.
    """
    measured_s = DEFAULT_STOP_S
    if recorded.steps_s:
        step_s = max(recorded.steps_s[-_RECENT:])
        evaluation_s = max(recorded.evaluations_s[-_RECENT:], default=0.0)
        save_s = max(recorded.saves_s[-_RECENT:], default=step_s)
        measured_s = int(step_s + evaluation_s + 2 * save_s + MIN_STOP_S)
    notice_s = asked_s or measured_s
    return notice_s if limit_s is None else min(notice_s, max(limit_s // 2, 1))


def _template(path: str) -> str:
    if path:
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"`cluster.slurm.template` = {path}: {error.strerror}; copy launcher/cluster/templates/slurm.sh there"
            ) from error
    return (resources.files("launcher.cluster") / "templates" / "slurm.sh").read_text(encoding="utf-8")


def _options(slurm: SlurmConfig, submission: Submission) -> list[str]:
    """Options of sbatch, in the order of the script."""
    given = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "gpus-per-node": str(slurm.gpus_per_node or "") if gres_gpus(slurm.extra) is None else "",
        "cpus-per-task": str(slurm.cpus_per_node or ""),
    }
    name = slurm.job_name or re.sub(r"[^\w.\-]", "-", submission.run_dir.name)
    return [
        f"--job-name={name}",
        f"--nodes={slurm.nodes + slurm.spares}",
        "--ntasks-per-node=1",
        *[f"--{option}={value}" for option, value in given.items() if value],
        *([] if slurm.cpus_per_node else ["--exclusive", *_whole_memory(slurm)]),
        f'--output="{submission.log}"',
        "--open-mode=append",
        "--requeue",
        *(["--no-kill"] if slurm.nodes + slurm.spares > 1 else []),
        f"--signal=B:USR1@{submission.stop_before_s}",
        f"--export={','.join(dict.fromkeys((*ALWAYS_EXPORTED, *slurm.environment, *submission.environment)))}",
        *slurm.extra,
    ]


def gres_gpus(extra: Sequence[str]) -> int | None:
    """GPUs of each node that `extra` requests by `--gres`; None if it requests none. Pure.

    SLURM refuses a job that requests GPUs with a type and without one. So `--gres=gpu:TYPE:COUNT` takes the place of
    `--gpus-per-node`. Of several `--gres` sbatch takes the last.
    """
    lists = [found[1] for option in extra if (found := _GRES.fullmatch(option.strip()))]
    entries = lists[-1].split(",") if lists else []
    counts = [int(gpus[1] or 1) for entry in entries if (gpus := _GPUS.fullmatch(entry.strip()))]
    return sum(counts) if counts else None


def _whole_memory(slurm: SlurmConfig) -> list[str]:
    """The option for all memory of a node: a job with `--exclusive` else has the partition's default memory only."""
    return [] if any(option.startswith("--mem") for option in slurm.extra) else ["--mem=0"]


def _python(container: ContainerConfig, submission: Submission) -> list[str]:
    if container.kind == "none":
        return [submission.python]
    if container.kind == "pyxis":
        return [container.python]
    binds = [word for mount in container.mounts for word in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", "--pwd", str(submission.work_dir), *binds, container.image, container.python]


def _srun_options(container: ContainerConfig, submission: Submission) -> str:
    """Shell words. All steps on a node use one container, so that pyxis unpacks the image once.

    pyxis gives every step a `/tmp` of its own, but the controller meets Ray's processes there: the node's is mounted.
    """
    if container.kind != "pyxis":
        return ""
    targets = [mount.split(":")[1] for mount in container.mounts if ":" in mount]
    mounts = [*([] if "/tmp" in targets else ["/tmp:/tmp"]), *container.mounts]
    options = [
        f"--container-image={container.image}",
        f"--container-workdir={submission.work_dir}",
        f"--container-mounts={','.join(mounts)}",
    ]
    return f'{shlex.join(options)} --container-name="megatron-rl-$SLURM_JOB_ID:no_exec"'
