"""Joining engines to the trainer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from launcher.commands.build import check_restarted_engine, publish_plan
from launcher.errors import LaunchError
from megatron_rl.config import ParallelConfig, PublishConfig, TrainerConfig
from megatron_rl.model.engine_model import as_built
from rollout.weights.format import WeightFormat
from tests.support.model_specs import qwen_spec

SPEC = qwen_spec()


class Workers:
    """Engines and trainer in one; the engines report `built`."""

    def __init__(self, built):
        self.built = built
        self.planned = []
        self.engines = self.trainer = self

    def built_models(self, *, timeout_s):
        return self.built

    def required(self, *, timeout_s):
        return []

    def plan_publishes(self, required):
        self.planned.append(required)

    def uses_te_layer_names(self):
        return False


def checked():
    config = SimpleNamespace(
        model="/models/qwen", publish=PublishConfig(), trainer=TrainerConfig(parallel=ParallelConfig())
    )
    return SimpleNamespace(config=config, spec=SPEC, format=WeightFormat(name="int8"))


def test_publishes_are_planned_for_engines_that_have_built_the_trainers_model():
    workers = Workers({0: as_built(SPEC), 1: as_built(SPEC)})
    assert publish_plan(checked(), workers).source_ranks == (0,)
    assert workers.planned == [[]]


def test_an_engine_with_another_rotary_base_is_refused_as_input_before_a_publish_is_planned():
    workers = Workers({0: as_built(SPEC), 1: replace(as_built(SPEC), rope_theta=1e6)})
    with pytest.raises(LaunchError, match=r"engine 1 .*rope_theta is 1000000\.0 in vLLM and 10000\.0 in the trainer"):
        publish_plan(checked(), workers)
    assert workers.planned == []


@pytest.mark.parametrize("change", [{"rope_theta": 5e5}, {"rms_norm_eps": 1e-5}])
def test_a_restarted_engine_that_has_read_another_configuration_is_refused_with_its_folder_and_machine(change):
    (name,) = change
    built = as_built(SPEC)
    engine = SimpleNamespace(built_models=lambda *, timeout_s: {0: built}, host_of=lambda number: "gpu-03")
    check_restarted_engine(checked(), 7, engine)
    built = replace(built, **change)
    with pytest.raises(LaunchError, match=rf"engine 7 .*{name} is .* /models/qwen on gpu-03 has changed .* restore it"):
        check_restarted_engine(checked(), 7, engine)
