"""Configuration of a SLURM job: `cluster.slurm`, read by `megatron-rl slurm` (`launcher.cluster.slurm_script`)."""

from typing import Literal

from pydantic import Field

from history.config import MOST_PROCESSES, Config


class ContainerConfig(Config):
    """Container of the job's processes."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """`pyxis`: `srun --container-image`, with enroot. `apptainer`: `apptainer exec --nv`. `none`: no container."""
    image: str = ""
    """Image name or path. Required unless `kind` is `none`."""
    mounts: tuple[str, ...] = ()
    """Mounts: `SOURCE:TARGET` or `SOURCE:TARGET:OPTIONS`. Run directory, model and data need the same paths as
    outside."""
    python: str = "python3"
    """Python interpreter inside the container, with megatron-rl installed."""


class SlurmConfig(Config):
    """The SLURM job that `megatron-rl slurm` submits. Empty values are left to SLURM's defaults."""

    nodes: int = Field(default=1, gt=0, le=MOST_PROCESSES)
    """Nodes that the run uses."""
    spares: int = Field(default=0, ge=0, le=MOST_PROCESSES)
    """Additional nodes to allocate. They replace nodes that fail the checks at the start of the job, or die later."""
    gpus_per_node: int = Field(default=0, ge=0, le=MOST_PROCESSES)
    """GPUs of each node. For GPUs of a type, `extra` also has `--gres=gpu:TYPE:COUNT` with the same number; the script
    then leaves `--gpus-per-node` out. With 0, `srun megatron-rl run` takes the number that its first node sees."""
    gpu: Literal["", "a100", "h100", "h200", "b200"] = ""
    """Kind of these GPUs, for checks before the job has its nodes. Empty: GPUs of 80 GB; on a node of the job those of
    this node."""
    cpus_per_node: int = Field(default=0, ge=0)
    """CPUs of each node. 0 requests whole nodes with all memory (`--exclusive --mem=0`). With a number of CPUs, the job
    has the partition's default memory unless `extra` has `--mem=...`."""
    partition: str = ""
    """Partition."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    time: str = ""
    """Time limit in quotes, because YAML reads `1:00:00` as a number: `"MINUTES"`, `"HOURS:MINUTES:SECONDS"`,
    `"DAYS-HOURS"` or `"DAYS-HOURS:MINUTES:SECONDS"`."""
    constraint: str = ""
    """Required node features."""
    exclude: str = ""
    """Nodes to leave out, as a SLURM host list."""
    job_name: str = ""
    """Name of the job. Empty: the name of the run directory."""
    extra: tuple[str, ...] = ()
    """Further options of sbatch, one `#SBATCH` line each, for example `--mail-type=END`."""
    stop_before_s: int = Field(default=0, ge=0)
    """Seconds before the time limit at which the run is asked to stop. 0: from the times of recent steps,
    evaluations and saves, or 600 before the first step."""
    container: ContainerConfig = ContainerConfig()
    """Container of the job's processes."""
    modules: tuple[str, ...] = ()
    """Environment modules to load on the nodes."""
    environment: tuple[str, ...] = ()
    """Names of variables that the job receives from the submitting shell. Values never enter the script. PATH, HOME,
    USER, LANG and LD_LIBRARY_PATH are always included."""
    interface: str = ""
    """Network interface whose IPv4 address each node uses: that of the node's name if the interface has it, else its
    first one. Empty: the address of the node's name."""
    addresses: dict[str, str] = {}
    """Addresses by node name. They take precedence over `interface`."""
    template: str = ""
    """Your own copy of `launcher/cluster/templates/slurm.sh`. Empty: the template of the package."""
