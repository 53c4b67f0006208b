"""Layers to recompute that Megatron's first forward would refuse are refused before a run starts."""

from dataclasses import replace

import pytest

from launcher.checks.further_models import critic_problems
from launcher.checks.model import recompute_problems
from launcher.config.schema import RunConfig
from megatron_rl.config import TrainerConfig
from tests.support.model_specs import qwen_spec

SPEC = qwen_spec(num_layers=10)


@pytest.mark.parametrize(
    ("recompute", "pipeline", "megatron", "said"),
    [
        ("full", 1, {"recompute_num_layers": 4}, ["recompute_num_layers = 4", "the 10 layers", "10 and its divisors"]),
        ("full", 2, {"recompute_num_layers": 2}, ["recompute_num_layers = 2", "the 5 layers", "5 and its divisors"]),
        ("full", 3, {"recompute_num_layers": 2}, ["the 3 and 4 layers", "1 and its divisors", "block"]),
        ("selective", 1, {"recompute_num_layers": 1}, ["`trainer.recompute` = selective", "set recompute to full"]),
    ],
)
def test_layers_that_cannot_be_recomputed_together_are_refused(
    recompute: str, pipeline: int, megatron: dict[str, object], said: list[str]
) -> None:
    keys = {"recompute": recompute, "parallel": {"pipeline": pipeline}, "megatron": megatron}
    (found,) = recompute_problems(SPEC, TrainerConfig.model_validate(keys))
    assert all(part in found for part in said), found


@pytest.mark.parametrize(
    ("recompute", "megatron"),
    [
        ("full", {}),
        ("full", {"recompute_num_layers": 5}),
        ("full", {"recompute_method": "block", "recompute_num_layers": 4}),
        ("none", {"recompute_num_layers": 4}),
        ("selective", {"recompute_method": "block"}),
    ],
)
def test_other_layers_are_accepted(recompute: str, megatron: dict[str, object]) -> None:
    trainer = TrainerConfig.model_validate({"recompute": recompute, "megatron": megatron})
    assert recompute_problems(SPEC, trainer) == []


@pytest.mark.parametrize(
    ("megatron", "said"),
    [
        ({"recompute_num_layers": 5}, ["recompute_num_layers = 5", "the 6 layers", "; 2 and its divisors do"]),
        ({"recompute_num_layers": 2}, []),
        ({"recompute_method": "block", "recompute_num_layers": 5}, []),
    ],
)
def test_layers_of_a_critic_are_recomputed_together_too(megatron: dict[str, object], said: list[str]) -> None:
    """A number that divides the policy's 10 layers must divide the 6 of its critic."""
    trainer = {"critic": {"model": "c"}, "recompute": "full", "megatron": megatron}
    base = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x"}]}}
    config = RunConfig.model_validate({**base, "algorithm": {"advantage": "gae"}, "trainer": trainer})
    assert recompute_problems(SPEC, config.trainer) == []
    found = critic_problems(config, replace(SPEC, num_layers=6), SPEC)
    assert len(found) == bool(said)
    assert all(part in found[0] for part in ["`trainer.critic.model`: ", *said] if said), found
