"""Builds the parts of a run, each from its configuration keys and from the facts in `CheckedRun`."""

from launcher.checks.check import CheckedRun
from launcher.commands.history import draft_spec
from launcher.config.schema import RunConfig
from megatron_rl.controller.colocation import DeviceSharing, KeepSampling, PauseEngines
from megatron_rl.controller.controller import LoopSettings
from megatron_rl.controller.delivery import ColocatedDelivery, ShmDelivery, StreamingDelivery, WeightDelivery
from megatron_rl.controller.phases import TrainPhasePolicy
from megatron_rl.controller.publisher import Publisher
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.spec import TrainerSpec
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard
from rollout.engine.spec import EngineSpec
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool
from rollout.types import SamplingSpec
from rollout.weights.format import WeightFormat


def train_phase_policy(config: RunConfig, engines: EngineGroup, pool: EnginePool) -> TrainPhasePolicy:
    """Policy of the engines during the train phase."""
    if config.placement.mode == "disaggregated":
        return KeepSampling(pool)
    return PauseEngines(engines, timeout_s=config.publish.timeout_s, leaves_work=config.samples_ahead)


def engine_specs(config: RunConfig, run_id: str) -> list[EngineSpec]:
    """Specifications of a run's engines, by number."""
    longest = max(
        [config.sampling.max_response_tokens, *(s.max_response_tokens for s in config.evaluation.sets.values())]
    )
    return [
        EngineSpec(
            engine_id=number,
            run_id=run_id,
            config=config.engine,
            directory=config.model,
            max_model_len=config.data.max_prompt_tokens + longest,
            in_flight=config.publish.in_flight,
            drafts=draft_spec(config, number, run_id),
        )
        for number in range(config.engine.num_engines)
    ]


def trainer_spec(config: RunConfig, format: WeightFormat, run_id: str) -> TrainerSpec:
    """Specification of a run's trainer ranks."""
    updates = config.num_steps * config.algorithm.num_epochs * config.algorithm.num_mini_batches
    return TrainerSpec(
        model=config.model,
        run_id=run_id,
        config=config.trainer,
        algorithm=config.algorithm,
        publish=config.publish,
        format=format,
        temperature=config.sampling.temperature,
        total_updates=updates,
        seed=config.seed,
    )


def sampling_spec(config: RunConfig) -> SamplingSpec:
    """Sampling parameters of training responses."""
    return SamplingSpec(
        temperature=config.sampling.temperature,
        max_response_tokens=config.sampling.max_response_tokens,
        stop_token_ids=config.sampling.stop_token_ids,
    )


def device_sharing(config: RunConfig, trainer: TrainerGroup, engines: EngineGroup) -> DeviceSharing | None:
    """Sleeping and offloading; None if trainer and engines stay in memory together."""
    sleep, offload = config.engine.sleep_level > 0, config.trainer.offload
    if not sleep and offload == "none":
        return None
    return DeviceSharing(
        trainer=trainer,
        engines=engines,
        offload=offload,
        sleep=sleep,
        timeout_s=config.publish.timeout_s,
        asleep=sleep,
    )


def build_publisher(
    checked: CheckedRun,
    trainer: TrainerGroup,
    engines: EngineGroup,
    delivery: WeightDelivery,
    plan: ReshardPlan,
    run_id: str,
    sharing: DeviceSharing | None,
) -> Publisher:
    """The publisher over a connected delivery."""
    config = checked.config
    return Publisher(
        trainer,
        engines,
        delivery,
        plan=plan,
        run_id=run_id,
        vocab_size=checked.spec.vocab_size,
        probe_length=config.publish.probe_tokens,
        max_probe_gap=config.engine.probe_max_logprob_gap[config.engine.format],
        timeout_s=config.publish.timeout_s,
        make_room=None if sharing is None else sharing.to_engines,
        drain_timeout_s=config.publish.drain_timeout_s if config.publish.in_flight == "drain" else None,
    )


def publish_plan(checked: CheckedRun, trainer: TrainerGroup, engines: EngineGroup) -> ReshardPlan:
    """Pieces that each trainer rank sends to each engine rank; the trainer computes the same plan."""
    config = checked.config
    required = engines.required(timeout_s=config.publish.timeout_s)
    trainer.plan_publishes(required)
    return plan_reshard(
        checked.spec,
        config.trainer.parallel,
        required=required,
        format=checked.format,
        bucket_bytes=config.publish.bucket_bytes,
        uses_te_layer_names=trainer.uses_te_layer_names(),
    )


def build_delivery(
    checked: CheckedRun, trainer: TrainerGroup, engines: EngineGroup, plan: ReshardPlan
) -> WeightDelivery:
    """The delivery of weights for the placement's transport; not connected."""
    timeout_s = checked.config.publish.timeout_s
    match checked.placement.transport:
        case "shm":
            return ShmDelivery(trainer, engines, timeout_s=timeout_s)
        case "cuda_ipc":
            homes = [slot.devices for slot in checked.placement.engines]
            return ColocatedDelivery(trainer, engines, homes=homes, memory="cuda", timeout_s=timeout_s)
        case backend:
            return StreamingDelivery(
                trainer, engines, source_ranks=plan.source_ranks, backend=backend, timeout_s=timeout_s
            )


def loop_settings(checked: CheckedRun) -> LoopSettings:
    """Numbers for the training loop."""
    config = checked.config
    return LoopSettings(
        num_steps=config.num_steps,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.checkpoint.every,
        max_micro_batch_tokens=config.trainer.max_micro_batch_tokens,
        data_parallel=config.trainer.parallel.data,
        costs=checked.costs,
        seed=config.seed,
    )
