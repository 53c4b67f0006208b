"""Builds the parts of a run that publish weights and share devices, from the facts in `CheckedRun`."""

from collections.abc import Callable
from functools import partial

from launcher.checks.check import CheckedRun
from launcher.cluster.placement import Placement
from launcher.commands.startup import Workers
from launcher.config.schema import RunConfig
from launcher.errors import LaunchError, judging_user_input
from launcher.run_dir.places import Places
from megatron_rl.batching.selection import has_signal
from megatron_rl.controller.colocation import DeviceSharing, KeepSampling, PauseEngines
from megatron_rl.controller.controller import LoopSettings
from megatron_rl.controller.delivery import ColocatedDelivery, ShmDelivery, StreamingDelivery, WeightDelivery
from megatron_rl.controller.phases import TrainPhasePolicy
from megatron_rl.controller.publisher import Publisher, PublishPart
from megatron_rl.model.engine_model import check_engine_models
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard
from rollout.planning.refill import RefillRule
from rollout.pool.engine_group import EngineGroup
from rollout.pool.engine_pool import EnginePool


def train_phase_policy(config: RunConfig, engines: EngineGroup, pool: EnginePool) -> TrainPhasePolicy:
    """Policy of the engines during the train phase."""
    if config.placement.mode == "disaggregated":
        return KeepSampling(pool)
    return PauseEngines(engines, pool, timeout_s=config.publish.timeout_s)


def refill_rule(config: RunConfig) -> RefillRule | None:
    """Dynamic sampling; None if it is turned off."""
    if not config.algorithm.max_refill:
        return None
    return RefillRule(
        max_groups=config.algorithm.max_groups,
        has_signal=partial(has_signal, algorithm=config.algorithm),
        is_repeatable=config.deterministic,
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
    workers: Workers,
    delivery: WeightDelivery,
    plan: ReshardPlan,
    sharing: DeviceSharing | None,
    begin_part: Callable[[PublishPart], None] = lambda part: None,
) -> Publisher:
    """The publisher over a connected delivery; `begin_part` is called when a part of a publish begins."""
    config = checked.config
    return Publisher(
        workers.trainer,
        workers.engines,
        delivery,
        plan=plan,
        run_id=workers.run_id,
        vocab_size=checked.spec.vocab_size,
        probe_length=config.publish.probe_tokens,
        max_probe_gap=config.engine.max_probe_gap,
        timeout_s=config.publish.timeout_s,
        declines_delta=checked.placement.declines_delta,
        make_room=None if sharing is None else sharing.to_engines,
        begin_part=begin_part,
        drain_timeout_s=config.publish.drain_timeout_s if config.publish.in_flight == "drain" else None,
    )


def publish_plan(checked: CheckedRun, workers: Workers) -> ReshardPlan:
    """Pieces that each trainer rank sends to each engine rank; the trainer computes the same plan.

    Raises:
        LaunchError: an engine has built another model than the trainer.
    """
    config = checked.config
    built = workers.engines.built_models(timeout_s=config.publish.timeout_s)
    with judging_user_input():
        check_engine_models(checked.spec, built)
    required = workers.engines.required(timeout_s=config.publish.timeout_s)
    workers.trainer.plan_publishes(required)
    return plan_reshard(
        checked.spec,
        config.trainer.parallel,
        required=required,
        format=checked.format,
        bucket_bytes=config.publish.bucket_bytes,
        uses_te_layer_names=workers.trainer.uses_te_layer_names(),
    )


def check_restarted_engine(checked: CheckedRun, number: int, engine: EngineGroup) -> None:
    """Compare the model of an engine that has started again with the trainer's; `engine` holds it alone.

    Raises:
        LaunchError: it has built another model than the trainer.
    """
    (built,) = engine.built_models(timeout_s=checked.config.publish.timeout_s).values()
    try:
        check_engine_models(checked.spec, {number: built})
    except ValueError as error:
        machine = f" on {host}" if (host := engine.host_of(0)) else ""
        raise LaunchError(
            f"restarted {error}. All engines had built the trainer's model when the run started, so the folder "
            f"{checked.config.model}{machine} has changed or is another copy: restore it and resume the run"
        ) from error


def build_delivery(checked: CheckedRun, workers: Workers, plan: ReshardPlan) -> WeightDelivery:
    """The delivery of weights for the placement's transport; not connected."""
    timeout_s = checked.config.publish.timeout_s
    trainer, engines = workers.trainer, workers.engines
    match checked.placement.transport:
        case "shm" if not checked.placement.spans_nodes:
            return ShmDelivery(trainer, engines, timeout_s=timeout_s)
        case "shm":
            return ColocatedDelivery(trainer, engines, homes=checked.placement.homes, memory="shm", timeout_s=timeout_s)
        case "cuda_ipc":
            return ColocatedDelivery(
                trainer, engines, homes=checked.placement.homes, memory="cuda", timeout_s=timeout_s
            )
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


def run_places(placement: Placement) -> Places:
    """Nodes of engines and trainer ranks, for the run directory."""
    return Places(
        engines=tuple(slot.node for slot in placement.engines), trainers=tuple(rank.node for rank in placement.trainers)
    )
