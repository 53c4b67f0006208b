"""Specifications of a run's processes and samples, from its configuration. Pure values."""

from launcher.commands.history import draft_spec
from launcher.config.schema import RunConfig
from megatron_rl.trainer.messages import TrainerSpec
from rollout.engine.spec import EngineSpec
from rollout.types import SamplingSpec
from rollout.weights.format import WeightFormat


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


def trainer_spec(config: RunConfig, format: WeightFormat, run_id: str, *, declines_delta: bool = False) -> TrainerSpec:
    """Specification of a run's trainer ranks; `declines_delta` as in `Placement`."""
    return TrainerSpec(
        model=config.model,
        run_id=run_id,
        config=config.trainer,
        algorithm=config.algorithm,
        publish=config.publish.model_copy(update={"delta": False}) if declines_delta else config.publish,
        format=format,
        temperature=config.sampling.temperature,
        max_response_tokens=config.sampling.max_response_tokens,
        total_updates=config.num_steps * config.algorithm.updates_per_step,
        seed=config.seed,
    )


def sampling_spec(config: RunConfig) -> SamplingSpec:
    """Sampling parameters of training responses."""
    return SamplingSpec(
        temperature=config.sampling.temperature,
        max_response_tokens=config.sampling.max_response_tokens,
        stop_token_ids=config.sampling.stop_token_ids,
    )
