"""Builds the models that an algorithm needs beside the policy: critic and reference policy, on one trainer rank."""

from pathlib import Path

from megatron_rl.algorithm.plug_in import needed_columns
from megatron_rl.model.build import ModelOptions, build, layer_names
from megatron_rl.model.parallel import Position
from megatron_rl.model.spec import ModelSpec, read_model_spec
from megatron_rl.model.value_model import build_value
from megatron_rl.quantization.fp8_parameters import forget_first_weights
from megatron_rl.trainer.critic import Critic
from megatron_rl.trainer.further_models import FurtherModels
from megatron_rl.trainer.messages import TrainerSpec
from megatron_rl.trainer.optimizer import LearnedModel
from megatron_rl.trainer.reference import DeviceReference, HostReference, Reference
from megatron_rl.weights import hf_load
from megatron_rl.weights.shards import Shard, rank_shards, trunk_shards
from rollout import progress


def model_options(spec: TrainerSpec) -> ModelOptions:
    """How the policy is built."""
    config = spec.config
    return ModelOptions(
        dtype=config.dtype,
        fp8=config.fp8,
        recompute=config.recompute,
        chunk_tokens=config.logprob_chunk_tokens,
        megatron=config.megatron,
    )


def policy_updates(spec: TrainerSpec) -> int:
    """Optimizer steps of the policy in the whole run. It waits during the warm-up of a critic."""
    has_critic = "values" in needed_columns(spec.algorithm)
    num_waits = spec.config.critic.warmup_steps if has_critic else 0
    return spec.total_updates - num_waits * spec.algorithm.updates_per_step


def held_shards(model: ModelSpec, spec: TrainerSpec, position: Position) -> tuple[Shard, ...]:
    """What this rank holds of a Hugging Face model."""
    return rank_shards(
        model,
        spec.config.parallel,
        tensor_rank=position.tensor,
        pipeline_rank=position.pipeline,
        data_rank=position.data,
        uses_te_layer_names=layer_names() == "te",
    )


def build_further(spec: TrainerSpec, position: Position, policy: LearnedModel) -> FurtherModels:
    """The models that the functions of the algorithm need; `policy` has just been loaded."""
    needed = needed_columns(spec.algorithm)
    return FurtherModels(
        reference=build_reference(spec, position, policy) if "ref" in needed else None,
        critic=build_critic(spec, position) if "values" in needed else None,
    )


def build_critic(spec: TrainerSpec, position: Position) -> Critic:
    """The critic, from the weights of `trainer.critic.model` or the policy's."""
    progress.mark("critic")
    config = spec.config.critic
    directory = Path(config.model or spec.model)
    model_spec = read_model_spec(directory)
    options = ModelOptions(dtype=spec.config.dtype, recompute=spec.config.recompute, megatron=spec.config.megatron)
    models = build_value(model_spec, spec.config.parallel, position, options)
    hf_load.load(models[0], trunk_shards(held_shards(model_spec, spec, position)), model_spec, directory)
    progress.mark("critic's optimizer")
    learned = LearnedModel.of(
        models, config.optimizer, dtype=spec.config.dtype, total_updates=spec.total_updates, fp8="none"
    )
    return Critic(learned, config)


def build_reference(spec: TrainerSpec, position: Position, policy: LearnedModel) -> Reference:
    """The reference policy: the weights that `policy` has been loaded with."""
    progress.mark("reference")
    if spec.config.reference.place == "host":
        return HostReference(policy.chunks, temperature=spec.temperature)
    model_spec = read_model_spec(Path(spec.model))
    models = build(model_spec, spec.config.parallel, position, model_options(spec))
    hf_load.load(models[0], held_shards(model_spec, spec, position), model_spec, Path(spec.model))
    forget_first_weights(models[0].parameters())
    return DeviceReference(models, policy.chunks, temperature=spec.temperature)
