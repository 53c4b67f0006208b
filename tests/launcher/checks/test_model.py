"""Layers to recompute that Megatron's first forward would refuse are refused before a run starts."""

import pytest

from launcher.checks.model import recompute_problems
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
