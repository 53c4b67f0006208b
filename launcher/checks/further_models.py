"""Problems of the models beside the policy: critic and reference policy. Pure."""

from collections.abc import Set as AbstractSet
from pathlib import Path

from launcher.checks.model import recompute_problems
from launcher.config.schema import RunConfig
from megatron_rl.config import CriticConfig, ReferenceConfig
from megatron_rl.memory import FurtherSpecs
from megatron_rl.model.spec import ModelSpec, check_parallel, read_model_spec
from megatron_rl.stages import Column


def further_specs(config: RunConfig, spec: ModelSpec) -> FurtherSpecs:
    """Architectures of the models that the built-in functions of the algorithm need.

    Raises:
        ValueError: the critic's directory has no readable configuration.
    """
    needs, critic = config.algorithm.needs, config.trainer.critic.model
    return FurtherSpecs(
        critic=(read_model_spec(Path(critic)) if critic else spec) if "values" in needs else None,
        reference=spec if "ref" in needs else None,
    )


def further_problems(config: RunConfig, needs: AbstractSet[Column]) -> list[str]:
    """Keys that have no effect or cannot be combined; `needs` are the columns that any function reads."""
    trainer, problems = config.trainer, []
    if trainer.critic != CriticConfig() and "values" not in needs:
        problems.append(
            "`trainer.critic` is set, but no function of the algorithm reads values; set `algorithm.advantage` to gae, "
            "or leave trainer.critic out"
        )
    if trainer.reference != ReferenceConfig() and "ref" not in needs:
        problems.append(
            "`trainer.reference` is set, but nothing reads the reference policy; set `algorithm.kl.place` to loss or "
            "reward, or leave trainer.reference out"
        )
    if trainer.reference.refresh_every and trainer.fp8 == "blockwise_param":
        problems.append(
            f"`trainer.reference.refresh_every` = {trainer.reference.refresh_every} with `trainer.fp8` = "
            "blockwise_param: checkpoints hold BF16 values, and a reference that is not the first model's could not be "
            "restored as FP8; set refresh_every to 0, or fp8 to blockwise"
        )
    if "values" in needs and trainer.critic.warmup_steps >= config.num_steps:
        problems.append(
            f"`trainer.critic.warmup_steps` = {trainer.critic.warmup_steps} with `num_steps` = {config.num_steps}: the "
            f"policy would never learn; set warmup_steps below {config.num_steps}"
        )
    return problems


def critic_problems(config: RunConfig, critic: ModelSpec, policy: ModelSpec) -> list[str]:
    """Problems of the critic's architecture."""
    problems = []
    if critic.vocab_size != policy.vocab_size:
        problems.append(
            f"`trainer.critic.model`: it has {critic.vocab_size} tokens in its vocabulary and the policy has "
            f"{policy.vocab_size}; choose a model with the policy's tokenizer"
        )
    try:
        check_parallel(critic, config.trainer.parallel)
    except ValueError as error:
        return [*problems, f"`trainer.critic.model`: {error}"]
    if config.trainer.recompute == "full":
        found = recompute_problems(critic, config.trainer, beside=[policy])
        problems += [f"`trainer.critic.model`: {problem}" for problem in found]
    return problems
