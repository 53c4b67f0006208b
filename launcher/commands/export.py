"""`megatron-rl export`: a checkpoint of a run as a Hugging Face directory."""

import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from launcher.checks.health.cpu_packages import machine_problems
from launcher.checks.memory import export_problems
from launcher.checks.model import partition_problems
from launcher.cluster.node import NodeResources, node_resources
from launcher.cluster.placement import plan_sft
from launcher.cluster.processes import Processes, processes
from launcher.cluster.ray_cluster import joined_nodes
from launcher.commands.specs import trainer_spec
from launcher.commands.startup import damage_of
from launcher.config.loading import listing, load
from launcher.config.schema import ExportConfig, RunConfig
from launcher.errors import ConfigError
from launcher.run_dir.checkpoints import Checkpoints
from launcher.run_dir.exported import mark, replace_folder
from launcher.run_dir.run_lock import RunLock
from megatron_rl.model.spec import read_model_spec
from megatron_rl.ranks import TrainerRank
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import TrainerSpec
from rollout.failures import CallError
from rollout.weights.format import WeightFormat

_PARTIAL = ".megatron-rl-export"
"""Begin of the name under which an export is written, beside `output_dir`. Nobody else's folder has such a name."""


def export(config: ExportConfig) -> None:
    """Load the checkpoint on this machine, or where `config.overrides` say, and write `config.output_dir`.

    An export that fails removes what it has written; the next one to the same place does so for one that was killed.

    Raises:
        ConfigError: there is no such checkpoint or it is damaged, the output directory exists, the partition is
            impossible, the weights do not fit, or this machine has GPUs and packages for CPUs.
        RunDirectoryError: the checkpoint from which the run would resume is gone, or `config.output_dir` lies in the
            directory of a run that goes on.
    """
    run_dir, target = Path(config.run_dir), Path(config.output_dir)
    checkpoint = _checkpoint(run_dir, config.step)
    _refuse_existing(target)
    run_config = _run_config(run_dir / "config.yaml", config.overrides)
    cluster = run_config.cluster
    nodes = (node_resources(),) if cluster.address == "local" else joined_nodes(cluster)
    if problems := [*machine_problems(cluster), *_problems(run_config, nodes[0])]:
        raise ConfigError(listing("export", problems))
    ranks = plan_sft(run_config.trainer, nodes)
    placed = Counter([nodes[0].name, *[rank.node for rank in ranks]])

    def write(partial: Path) -> None:
        """When it ends, so have the processes: nothing is written any more."""
        with processes(cluster, num_actors=len(ranks), log_dir=None, nodes=nodes, placed=placed) as running:
            spec = trainer_spec(run_config, WeightFormat.of(run_config.engine), secrets.token_hex(4))
            try:
                trainer = start_policy(running, spec, ranks, str(checkpoint / "trainer"))
            except CallError as error:
                if (damage := damage_of(error)) is None:
                    raise
                raise ConfigError(f"checkpoint {checkpoint} cannot be used: {damage}; {_others(checkpoint)}") from error
            trainer.export(str(partial))
        mark(partial, int(checkpoint.name))
        _refuse_existing(target)  # somebody may have made it in these minutes

    with ExitStack() as held:
        if target.resolve().parent == run_dir.resolve():  # a run removes what is unfinished there
            held.callback(RunLock(run_dir / "LOCK").release)
        replace_folder(target, target.with_name(f"{_PARTIAL}.{target.name}"), write)
    print(f"wrote {target} from step {checkpoint.name}")


def _others(checkpoint: Path) -> str:
    """What to export in place of a checkpoint, as the end of an error."""
    steps = [str(step) for step in Checkpoints(checkpoint.parent).steps() if step != int(checkpoint.name)]
    return f"name another `step`: {', '.join(steps)}" if steps else "the run holds no other checkpoint"


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"`output_dir` = {target} exists; an export overwrites nothing: name another directory")


def start_policy(running: Processes, spec: TrainerSpec, ranks: Sequence[TrainerRank], checkpoint: str) -> TrainerGroup:
    """Start ranks with the policy of a trainer's `checkpoint`; they can only export it."""
    return running.start_trainer(replace(spec, exports=checkpoint), ranks)


def _run_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the run, for one replica of its trainer on this machine, then with `overrides`.

    A checkpoint can be read under any partition. Experts stay spread over as many ranks as in the run.
    """
    expert = load(RunConfig, path, overrides).trainer.parallel.expert
    here = ("cluster.address=local", "cluster.min_nodes=1", "cluster.max_nodes=0", f"trainer.parallel.data={expert}")
    return load(RunConfig, path, [*here, *overrides])


def _problems(config: RunConfig, node: NodeResources) -> list[str]:
    try:
        spec = read_model_spec(Path(config.model))
    except ValueError as error:
        return [f"`model` = {config.model}: {error}"]
    impossible = partition_problems(spec, config.trainer.parallel, node)
    is_alone = config.cluster.address == "local"
    return impossible or export_problems(spec, config.trainer, node, is_alone=is_alone)


def _checkpoint(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`; if that is -1, of the checkpoint from which the run would resume."""
    folder = run_dir / "checkpoints"
    checkpoints = Checkpoints(folder)
    newest = checkpoints.latest() if folder.is_dir() and step == -1 else None
    if newest is not None:
        return newest[1]
    steps = checkpoints.steps() if folder.is_dir() else []
    if not steps:
        raise ConfigError(f"{run_dir} holds no checkpoint; name the directory of a run that saved one")
    if step not in steps:
        raise ConfigError(f"{run_dir} holds no checkpoint of step {step}; it holds {', '.join(map(str, steps))}")
    return folder / str(step)
