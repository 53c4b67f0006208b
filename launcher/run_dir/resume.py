"""Changes between two starts of a run: some are refused, all others are reported.

A resumed run continues the same prompt order, seeds and weights; a configuration with another one needs another run
directory. Everything else may change (more steps, other engines, another partition).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from launcher.config.schema import RunConfig
from launcher.errors import RunDirectoryError
from launcher.run_dir.atomic_files import replace_text
from megatron_rl.algorithm_settings import STAGES
from megatron_rl.config import OptimizerConfig

FIXED = ("model", "seed", "deterministic", "data.train", "data.shuffle")
"""Keys that must not change."""
UPDATES = ("algorithm.num_mini_batches", "algorithm.num_epochs")
"""Keys whose product is the number of optimizer steps of a step."""
WARMUPS = ("trainer.optimizer.warmup_steps", "trainer.critic.optimizer.warmup_steps")
FIRST_MODEL = "model.json"
"""File of a run directory with the digest of the first weights."""
DIGESTED_BYTES = 1 << 20
"""Of both ends of each file of weights: enough to tell two trainings apart, and read at once for any size."""


def check_first_model(run_dir: Path, model: Path, *, resumes: bool) -> None:
    """Note the weights that a run starts from; a run that resumes needs the same.

    A reference policy and the evaluation of the first weights read them again.

    Raises:
        RunDirectoryError: the files in `model` hold other weights than at the first start.
    """
    digest, noted = _digest(model), run_dir / FIRST_MODEL
    if resumes and noted.exists():
        if _noted_digest(noted) != digest:
            raise RunDirectoryError(
                f"`model` = {model} holds other weights than at the first start of run_dir `{run_dir}`; restore them, "
                f"or name another run_dir. If they are right, remove {FIRST_MODEL} there"
            )
        return
    replace_text(noted, json.dumps({"model": str(model), "digest": digest}) + "\n")


def _noted_digest(noted: Path) -> str:
    try:
        return str(json.loads(noted.read_text(encoding="utf-8"))["digest"])
    except (ValueError, LookupError, TypeError) as error:
        raise RunDirectoryError(
            f"{noted} is damaged, so the weights of the first start are unknown; if `model` holds them, remove that "
            "file"
        ) from error


def _digest(model: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            found.update(file.read(DIGESTED_BYTES))
            file.seek(max(0, size - DIGESTED_BYTES))
            found.update(file.read())
    return found.hexdigest()


def changed_keys(run_dir: Path, config: RunConfig) -> list[str]:
    """`key: before -> now` for each key of the saved configuration that differs from `config`; none before the first
    start.

    Raises `RunDirectoryError` if one of `FIXED` differs, or if the saved file is damaged or has a function's name of an
    earlier version.
    """
    saved = run_dir / "config.yaml"
    if not saved.exists():
        return []
    before = _read_saved(saved)
    _refuse_renamed(saved, before)
    lines = {key: f"{line}{_consequence(key, config)}" for key, line in _differences(before, config).items()}
    if fixed := [line for key, line in lines.items() if key in FIXED]:
        raise RunDirectoryError(
            f"run_dir `{run_dir}` holds a run with another configuration: {'; '.join(fixed)}; "
            "name another run_dir, or restore the old values to resume"
        )
    return list(lines.values())


def _read_saved(saved: Path) -> dict[str, object]:
    try:
        before = yaml.safe_load(saved.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError("it holds no table")
    except (ValueError, yaml.YAMLError) as error:
        raise RunDirectoryError(
            f"{saved}, the configuration of the last start, is damaged ({str(error).splitlines()[0]}); restore it, or "
            "remove it to resume without a comparison"
        ) from error
    return flat_keys(before)


def changes_since_last_start(run_dir: Path, config: RunConfig) -> list[str]:
    """As `changed_keys`, for a run without a checkpoint. It starts from its first weights, so every key may change."""
    saved = run_dir / "config.yaml"
    try:
        before = yaml.safe_load(saved.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, yaml.YAMLError):  # the lines serve a person only, and end no start
        return []
    return list(_differences(flat_keys(before), config).values()) if isinstance(before, dict) else []


def _differences(before: Mapping[str, object], config: RunConfig) -> dict[str, str]:
    """`key: before -> now` of each key that differs, by key."""
    now = flat_keys(config.model_dump(mode="json"))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key != "run_dir"]
    return {key: f"{key}: {before.get(key)} -> {now.get(key)}" for key in changed}


def _consequence(key: str, config: RunConfig) -> str:
    """What else a changed key changes without a word, or what it does not change."""
    targets = {
        "algorithm.kl.coefficient": config.algorithm.kl.target,
        "algorithm.entropy.coefficient": config.algorithm.entropy.target,
    }
    if key == "num_steps" or key in UPDATES:
        said = _of_decays(key, config)
    elif key in WARMUPS:
        said = ["a warm-up that is over stays over"]
    elif key == "trainer.critic.warmup_steps" and _decays_over_the_run(config.trainer.optimizer):
        said = ["the schedule of the policy's learning rate begins after these steps, so the rate moves"]
    elif targets.get(key):
        said = ["the adaptive coefficient begins anew there, but not from a checkpoint of an earlier version"]
    else:
        said = []
    return f" ({'; '.join(said)})" if said else ""


def _decays_over_the_run(optimizer: OptimizerConfig) -> bool:
    return optimizer.decay != "constant" and not optimizer.decay_steps


def _of_decays(key: str, config: RunConfig) -> list[str]:
    """What another number of steps, or of optimizer steps in each, does to the learning rates that decay."""
    optimizers = {
        "the learning rate": ("trainer.optimizer", config.trainer.optimizer),
        "the critic's learning rate": ("trainer.critic.optimizer", config.trainer.critic.optimizer),
    }
    said = []
    for rate, (name, optimizer) in optimizers.items():
        if optimizer.decay == "constant":
            continue
        if key in UPDATES and optimizer.decay_steps:
            updates = config.algorithm.updates_per_step
            said.append(f"{name}.decay_steps = {optimizer.decay_steps} counts optimizer steps, now {updates} a step")
        elif key in UPDATES:
            warmup = "once its warm-up is over, " if optimizer.warmup_steps else ""
            said.append(f"{warmup}{rate} keeps its place in the run and decays until step {config.num_steps}")
        elif not optimizer.decay_steps:
            said.append(f"{rate} now decays until step {config.num_steps}; fix it by {name}.decay_steps")
    return said


def _refuse_renamed(saved: Path, before: Mapping[str, object]) -> None:
    """Raises if a stage of the saved configuration has the name of a built-in function of an earlier version."""
    for stage in STAGES:
        value = before.get(f"{stage.key}.name", before.get(stage.key))
        if isinstance(value, str) and (problem := stage.problem(value)):
            raise RunDirectoryError(f"`{saved}`: `{stage.key}` = {value}: {problem} in that file, then resume")


def flat_keys(value: object, prefix: str = "") -> dict[str, object]:
    """Dotted keys of nested tables; lists stay whole."""
    if not isinstance(value, dict):
        return {prefix.rstrip("."): value}
    return {key: leaf for name, inner in value.items() for key, leaf in flat_keys(inner, f"{prefix}{name}.").items()}
