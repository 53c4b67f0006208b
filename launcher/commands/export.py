"""`megatron-rl export`: a checkpoint of a run as a Hugging Face directory."""

import secrets
from pathlib import Path

from launcher.cluster.processes import processes
from launcher.commands.specs import trainer_spec
from launcher.config.loading import load
from launcher.config.schema import ExportConfig, RunConfig
from launcher.errors import ConfigError
from megatron_rl.ranks import trainer_ranks
from rollout.weights.format import WeightFormat


def export(config: ExportConfig) -> None:
    """Load the checkpoint under the run's own partition and write `config.output_dir`.

    Raises:
        ConfigError: there is no such checkpoint, or the output directory exists.
    """
    run_dir, target = Path(config.run_dir), Path(config.output_dir)
    checkpoint = _checkpoint(run_dir, config.step)
    if target.exists():
        raise ConfigError(f"`output_dir` = {target} exists; an export overwrites nothing: name another directory")
    run_config = load(RunConfig, str(run_dir / "config.yaml"), [])
    parallel = run_config.trainer.parallel
    ranks = trainer_ranks(parallel, run_config.trainer.cpu_threads)
    with processes(run_config.cluster, num_actors=len(ranks), log_dir=None) as running:
        trainer = running.start_trainer(
            trainer_spec(run_config, WeightFormat.of(run_config.engine), secrets.token_hex(4)), ranks
        )
        trainer.load(str(checkpoint / "trainer"))
        trainer.export(str(target))
    print(f"wrote {target} from step {checkpoint.name}")


def _checkpoint(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, or of the newest checkpoint if it is -1."""
    folder = run_dir / "checkpoints"
    steps = sorted(int(child.name) for child in folder.glob("*") if child.name.isdecimal())
    if not steps:
        raise ConfigError(f"{run_dir} holds no checkpoint; name the directory of a run that saved one")
    chosen = steps[-1] if step == -1 else step
    if chosen not in steps:
        raise ConfigError(f"{run_dir} holds no checkpoint of step {step}; it holds {', '.join(map(str, steps))}")
    return folder / str(chosen)
