"""Combinations of keys that cannot run, or that risk a long run, judged from the configuration alone.

Each function returns one sentence per problem. A sentence names both values and the fix.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.checks.algorithm import algorithm_problems
from launcher.checks.functions import function_problems
from launcher.checks.slurm import slurm_problems, variable_names
from launcher.config.schema import RunConfig
from megatron_rl.algorithm_settings import KeepAll, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from megatron_rl.config import OptimizerConfig
from rollout.config import EvalSetConfig
from rollout.types import TRAIN

LONG_RUN_STEPS = 100
"""Steps from which a run without checkpoints causes a warning; at a few minutes a step, a failure then costs hours."""


def run_combinations(config: RunConfig) -> list[str]:
    """Contradictions between the keys of a run."""
    checks: Sequence[Callable[[RunConfig], list[str]]] = (
        _sampling,
        _deterministic,
        _batch_sizes,
        algorithm_problems,
        _schedule,
        _history,
        _publish,
        _planner,
        _refill,
        _mode,
        lambda config: slurm_problems(config.cluster.slurm),
        lambda config: variable_names("reward.environment", config.reward.environment),
        lambda config: evaluation_sets(config.evaluation.sets, "evaluation.sets"),
        _set_names,
        lambda config: function_problems(
            {"reward.function": config.reward.function},
        ),
    )
    return [problem for check in checks for problem in check(config)]


def checkpoint_warnings(config: RunConfig) -> list[str]:
    """Warns of a long run that saves nothing before its last step."""
    if config.checkpoint.every or config.num_steps < LONG_RUN_STEPS:
        return []
    return [
        f"`checkpoint.every` = 0 saves after the last of {config.num_steps} steps only, so a failure repeats all "
        "before it; set it to 20, for example"
    ]


def _sampling(config: RunConfig) -> list[str]:
    problems = []
    if config.sampling.top_p != 1:
        problems.append(
            f"`sampling.top_p` = {config.sampling.top_p}: training responses need 1, because truncation renormalises "
            "the sampler alone and biases the importance weights; set it to 1 (evaluation sets may truncate)"
        )
    if config.sampling.top_k != 0:
        problems.append(
            f"`sampling.top_k` = {config.sampling.top_k}: training responses need 0 (no limit), because truncation "
            "renormalises the sampler alone and biases the importance weights; set it to 0"
        )
    return problems


def _deterministic(config: RunConfig) -> list[str]:
    problems = []
    if config.deterministic and config.engine.num_engines != 1:
        problems.append(
            f"`deterministic` = true with `engine.num_engines` = {config.engine.num_engines}: the engine of a group "
            "depends on timing; set engine.num_engines to 1 or deterministic to false"
        )
    if config.deterministic and config.planner.policy == "flexible":
        problems.append(
            "`deterministic` = true with `planner.policy` = flexible: a batch has the groups that end first, which "
            "depends on timing; choose another policy or set deterministic to false"
        )
    return problems


def _batch_sizes(config: RunConfig) -> list[str]:
    algorithm, data_parallel = config.algorithm, config.trainer.parallel.data
    samples = algorithm.prompts_per_step * algorithm.group_size
    product = f"algorithm.prompts_per_step x group_size = {algorithm.prompts_per_step} x {algorithm.group_size}"
    if algorithm.prompts_per_step % algorithm.num_mini_batches:
        return [
            f"`algorithm.prompts_per_step` = {algorithm.prompts_per_step} groups cannot be cut into "
            f"`algorithm.num_mini_batches` = {algorithm.num_mini_batches} mini batches of equally many groups; "
            f"choose a divisor of {algorithm.prompts_per_step}"
        ]
    if samples // algorithm.num_mini_batches % data_parallel:
        return [
            f"{product} over {algorithm.num_mini_batches} mini batches is {samples // algorithm.num_mini_batches} "
            f"samples each, not divisible by `trainer.parallel.data` = {data_parallel}; lower "
            "`algorithm.num_mini_batches`, or change one of the sizes"
        ]
    return []


def _schedule(config: RunConfig) -> list[str]:
    problems = schedule_problems(config.trainer.optimizer, "trainer.optimizer")
    if "values" in config.algorithm.needs:
        problems += schedule_problems(config.trainer.critic.optimizer, "trainer.critic.optimizer")
    return problems


def schedule_problems(optimizer: OptimizerConfig, key: str) -> list[str]:
    """Contradictions of the learning-rate schedule at the configuration key `key`."""
    problems = []
    if optimizer.decay == "constant":
        of_decay = {"min_learning_rate": optimizer.min_learning_rate, "decay_steps": optimizer.decay_steps}
        problems += [
            f"`{key}.{name}` = {value} with `{key}.decay` = constant: the learning rate stays at its peak; set decay "
            f"to linear or cosine, or {name} to 0"
            for name, value in of_decay.items()
            if value
        ]
    if optimizer.min_learning_rate > optimizer.learning_rate:
        problems.append(
            f"`{key}.min_learning_rate` = {optimizer.min_learning_rate} is above "
            f"`{key}.learning_rate` = {optimizer.learning_rate}, where the decay begins; lower it"
        )
    if 0 < optimizer.decay_steps < optimizer.warmup_steps:
        problems.append(
            f"`{key}.decay_steps` = {optimizer.decay_steps} is below "
            f"`{key}.warmup_steps` = {optimizer.warmup_steps}; decay counts from the first step, so "
            "raise decay_steps"
        )
    return problems


def _history(config: RunConfig) -> list[str]:
    engines = config.engine.num_engines
    return [
        f"`history.baseline_engines` names engine {number}, but `engine.num_engines` = {engines}: they count from 0; "
        "remove it"
        for number in config.history.baseline_engines
        if not 0 <= number < engines
    ]


def _publish(config: RunConfig) -> list[str]:
    problems = []
    if config.engine.kv_format == "fp8" and config.publish.in_flight == "keep_kv":
        problems.append(
            "`engine.kv_format` = fp8 with `publish.in_flight` = keep_kv: a publish sets new scales, and codes of the "
            "old ones would be read with them; set in_flight to recompute, or kv_format to bf16"
        )
    if config.engine.sleep_level and config.publish.in_flight != "recompute":
        problems.append(
            f"`publish.in_flight` = {config.publish.in_flight} with `engine.sleep_level` = "
            f"{config.engine.sleep_level}: an engine that sleeps frees all keys and values before the publish, so "
            "running responses are recomputed; set in_flight to recompute, or sleep_level to 0"
        )
    if config.publish.delta and config.publish.transport in ("shm", "cuda_ipc"):
        problems.append(
            f"`publish.delta` = true with `publish.transport` = {config.publish.transport}: engines map the trainer's "
            "memory, so a delta saves no bytes; set delta to false or transport to auto"
        )
    return problems


def _planner(config: RunConfig) -> list[str]:
    planner, problems = config.planner, []
    flexible = planner.policy == "flexible"
    needed = planner.overlap + (planner.head_start > 0 and not flexible)
    if planner.max_staleness < needed:
        problems.append(
            f"`planner.max_staleness` = {planner.max_staleness} is below {needed}, the staleness allowed by "
            f"`planner.overlap` = {planner.overlap} and `planner.head_start` = {planner.head_start}; raise it or lower "
            "them"
        )
    if planner.tail_engines >= config.engine.num_engines:
        problems.append(
            f"`planner.tail_engines` = {planner.tail_engines} with `engine.num_engines` = {config.engine.num_engines}: "
            "no engine is left for the other groups; lower it"
        )
    if flexible and planner.head_start > 0:
        problems.append(
            f"`planner.head_start` = {planner.head_start} with `planner.policy` = flexible, which trains on the groups "
            "that finish first: set head_start to 0, or the policy to adaptive"
        )
    if config.deterministic and config.samples_ahead:
        problems.append(
            f"`deterministic` = true with `planner.overlap` = {planner.overlap} and `planner.head_start` = "
            f"{planner.head_start}: the token at which a response meets new weights depends on timing; set both to 0 "
            "or deterministic to false"
        )
    return problems


def _refill(config: RunConfig) -> list[str]:
    if not config.algorithm.max_refill:
        return []
    planner, problems = config.planner, []
    key = f"`algorithm.max_refill` = {config.algorithm.max_refill}"
    if config.algorithm.max_groups == config.algorithm.prompts_per_step:
        problems.append(
            f"{key} with `algorithm.prompts_per_step` = {config.algorithm.prompts_per_step}: their product is not one "
            "group, so nothing would be replaced; set max_refill to 2, for example, or to 0"
        )
    if isinstance(config.algorithm.filter, KeepAll):
        problems.append(
            f"{key} with `algorithm.filter` = none: groups without signal would be trained on, not replaced; set "
            "filter to accuracy (or zero_variance with an advantage over groups), or max_refill to 0"
        )
    if isinstance(config.algorithm.advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline):
        problems.append(
            f"{key} with `algorithm.advantage` = {config.algorithm.advantage.name}: its advantages are known once all "
            "groups of the step are, so none can be judged alone; choose an advantage over groups, or set max_refill "
            "to 0"
        )
    if planner.policy == "flexible":
        problems.append(
            f"{key} with `planner.policy` = flexible: the groups that end first would fill the batch, and groups "
            "without signal are often the short ones; choose another policy or set max_refill to 0"
        )
    elif planner.head_start > 0:
        problems.append(
            f"{key} with `planner.head_start` = {planner.head_start}: which groups the next step trains on is open "
            "until their signal is known; set head_start to 0 (and overlap to 1 or more), or max_refill to 0"
        )
    if config.deterministic and planner.max_staleness:
        problems.append(
            f"`deterministic` = true and {key} with `planner.max_staleness` = {planner.max_staleness}: groups that are "
            "left over would be kept for the next step, but no checkpoint holds them; set max_staleness to 0"
        )
    return problems


def _mode(config: RunConfig) -> list[str]:
    mode, problems = config.placement.mode, []
    if mode == "disaggregated":
        colocated_only = {
            "engine.sleep_level": config.engine.sleep_level or None,
            "trainer.offload": config.trainer.offload if config.trainer.offload != "none" else None,
            "publish.transport": "cuda_ipc" if config.publish.transport == "cuda_ipc" else None,
        }
        problems += [
            f"`placement.mode` = disaggregated with `{key}` = {value}: the key needs trainer and engines on the same "
            f"devices; set {key} to its default or the mode to colocated"
            for key, value in colocated_only.items()
            if value is not None
        ]
    elif config.publish.transport == "nccl":
        problems.append(
            "`publish.transport` = nccl with `placement.mode` = colocated: two processes on one device cannot share a "
            "communicator; set the mode to disaggregated or the transport to auto"
        )
    return problems


def _set_names(config: RunConfig) -> list[str]:
    """Prompt ids, histories and seeds of a set begin with its name, and those of training with the name of a file."""
    paths: dict[str, str] = {}
    problems = []
    for number, dataset in enumerate(config.data.train):
        name = dataset.name or Path(dataset.path).stem
        if name in paths:
            problems.append(
                f"`data.train.{number}.path` = {dataset.path} has the name {name}, as {paths[name]} has: the two would "
                f"share prompt ids and history; set `data.train.{number}.name`"
            )
        paths.setdefault(name, dataset.path)
    for name in config.evaluation.sets:
        if name in paths:
            problems.append(
                f"`evaluation.sets.{name}` has the name of a training file: the two would share prompt ids and "
                "history; rename the set, or set `data.train.N.name`"
            )
        elif name == TRAIN:
            problems.append("`evaluation.sets.train` would be taken for training; give the set another name")
    return problems


def evaluation_sets(sets: dict[str, EvalSetConfig], key: str) -> list[str]:
    """Problems of evaluation sets that would repeat one greedy response."""
    return [
        f"`{key}.{name}.samples_per_prompt` = {config.samples_per_prompt} with temperature 0: greedy responses of one "
        "prompt are all equal; set samples_per_prompt to 1 or temperature above 0"
        for name, config in sets.items()
        if config.samples_per_prompt > 1 and config.temperature == 0
    ]
