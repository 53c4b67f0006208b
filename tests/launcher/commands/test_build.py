"""Joining engines to the trainer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from launcher.commands.build import publish_plan
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
    config = SimpleNamespace(publish=PublishConfig(), trainer=TrainerConfig(parallel=ParallelConfig()))
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
