"""Compares the models that engines have built with the trainer's, before the first publish.

Both sides read the same `config.json`, each in its own way. Weight sums cannot show another rotary base or epsilon, and
in 8-bit formats the probe's bound hides it. So the numbers are compared exactly. Pure.
"""

from collections.abc import Mapping
from dataclasses import fields

from megatron_rl.model.spec import ModelSpec
from rollout.built_model import BuiltModel


def as_built(spec: ModelSpec) -> BuiltModel:
    """What an engine must have built for a model."""
    scaling = spec.rope_scaling
    return BuiltModel(
        head_dim=spec.head_dim,
        rotary_dim=spec.head_dim,
        rope_type="default" if scaling is None else "llama3",
        rope_theta=spec.rope_theta,
        rope_scaling=None
        if scaling is None
        else (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions),
        rms_norm_eps=spec.rms_eps,
        sliding_window=None,
        logit_scale=1.0,
        tie_word_embeddings=spec.tied,
    )


def check_engine_models(spec: ModelSpec, engines: Mapping[int, BuiltModel]) -> None:
    """Compare the model of each engine, by engine number, with the trainer's.

    Raises:
        ValueError: naming the engine, the fields that differ and both values.
    """
    expected = as_built(spec)
    for number, built in engines.items():
        lines = [
            f"{name} is {getattr(built, name)!r} in vLLM and {getattr(expected, name)!r} in the trainer"
            for name in (field.name for field in fields(BuiltModel))
            if getattr(built, name) != getattr(expected, name)
        ]
        if lines:
            raise ValueError(
                f"engine {number} has built another model than the trainer: {'; '.join(lines)}. Engines would sample "
                "from a model that is not trained: set these keys in the model's config.json explicitly, and remove "
                "keys of engine.vllm that change the model"
            )
