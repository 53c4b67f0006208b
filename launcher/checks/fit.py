"""Whether a run fits its model, its nodes and their memory; needs the model's `config.json` and no other file. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.checks.further_models import critic_problems, further_specs
from launcher.checks.kv_cache import cache_problems, evaluation_problems, fraction_problems, has_room, sized
from launcher.checks.memory import MemoryPlan, run_memory
from launcher.checks.model import model_problems, partition_problems
from launcher.cluster.node import NodeResources
from launcher.cluster.placement import Placement, plan
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.trainer_kernels import trainer_kernels
from megatron_rl.memory import FurtherSpecs
from megatron_rl.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Places and memory of a run."""

    config: RunConfig
    """With the size of the KV cache (`launcher.checks.kv_cache`)."""
    placement: Placement
    memory: MemoryPlan
    further: FurtherSpecs
    """Models beside the policy."""


def fit(
    config: RunConfig,
    spec: ModelSpec,
    nodes: Sequence[NodeResources],
    problems: list[str],
    *,
    flash_attention: str | None = "",
    num_prompts: int = 0,
) -> Fit | None:
    """Places and memory of a run; None if it cannot be placed. Reasons are added to `problems`.

    `flash_attention` is the version of the package `flash-attn` on the nodes; empty without it, None if unknown.
    `num_prompts` is the number of training prompts; 0 if unknown.
    """
    problems += [*cache_problems(config, nodes[0]), *model_problems(config, spec, nodes[0])]
    if partition_problems(spec, config.trainer.parallel, nodes[0]):
        return None
    try:
        further = further_specs(config, spec)
        placement = plan(config, nodes)
    except (ConfigError, ValueError) as error:
        problems.append(str(error))
        return None
    kernels = trainer_kernels(config.trainer, nodes[0], flash_attention=flash_attention)
    given = PlannedRun(
        config=config, spec=spec, placement=placement, further=further, kernels=kernels, num_prompts=num_prompts
    )
    problems += fraction_problems(given, nodes)
    run, fraction = sized(given, nodes), config.engine.gpu_memory_fraction
    if run is not given and has_room(given, nodes):  # else the memory plan names what to change
        found = model_problems(run.config, spec, nodes[0], fraction=fraction)
        problems += [problem for problem in found if problem not in problems]
    if further.critic is not None and further.critic is not spec:
        problems += critic_problems(config, further.critic, spec)
        if problems:
            return None
    memory = run_memory(run, nodes)
    problems += [*memory.problems(), *evaluation_problems(run.config, spec, nodes)]
    return Fit(config=run.config, placement=placement, memory=memory, further=further)
