"""Impossible combinations with `trainer.fp8` are refused naming both values; double rounding causes a warning."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks.check import check_run
from launcher.checks.fp8 import fp8_problems, fp8_warnings
from launcher.cluster.node import NodeResources
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.config import TrainerConfig
from megatron_rl.model.spec import ModelSpec
from rollout.config import Format
from rollout.weights.format import WeightFormat
from tests.launcher.checks.test_formats import CPU, GPU, QWEN_7B, QWEN_30B_A3B

HOPPER, AMPERE = replace(GPU, gpu_capability=(9, 0)), replace(GPU, gpu_capability=(8, 0))
DISTRIBUTED = {"distributed": True}


def problems(node: NodeResources = HOPPER, spec: ModelSpec = QWEN_7B, **keys: object) -> list[str]:
    return fp8_problems(spec, TrainerConfig.model_validate(keys), node)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("spec", [QWEN_7B, QWEN_30B_A3B])
@pytest.mark.parametrize("fp8", ["none", "blockwise", "blockwise_param"])
def test_fp8_training_of_common_models_is_accepted(fp8: str, spec: ModelSpec, tensor: int) -> None:
    assert problems(spec=spec, fp8=fp8, optimizer=DISTRIBUTED, parallel={"tensor": tensor}) == []
    assert problems(GPU, spec=spec, fp8=fp8, optimizer=DISTRIBUTED) == [], "of an unknown GPU nothing is said"


@pytest.mark.parametrize(
    ("node", "keys", "said"),
    [
        (CPU, {"fp8": "blockwise"}, ["`trainer.fp8` = blockwise", "CPU", "none"]),
        (AMPERE, {"fp8": "blockwise"}, ["`trainer.fp8` = blockwise", "compute capability 8.0", "needs 9.0"]),
        (HOPPER, {"fp8": "blockwise", "dtype": "fp32"}, ["`trainer.fp8` = blockwise", "`trainer.dtype` = fp32"]),
        (HOPPER, {"fp8": "blockwise_param"}, ["blockwise_param", "`trainer.optimizer.distributed` = false", "true"]),
    ],
)
def test_impossible_combinations_with_fp8_are_refused(
    node: NodeResources, keys: dict[str, object], said: list[str]
) -> None:
    (found,) = problems(node, **keys)
    assert all(part in found for part in said), found


def test_matrices_that_cannot_be_multiplied_in_fp8_are_refused_by_name_and_shape() -> None:
    odd = replace(QWEN_7B, ffn_size=18944 + 32)
    assert problems(spec=odd, fp8="blockwise") == []
    (found,) = problems(spec=odd, fp8="blockwise", parallel={"tensor": 4})
    assert "3584 x 4744 (mlp.linear_fc2.weight)" in found and "multiples of 16" in found


def test_hidden_sizes_that_cannot_be_gathered_in_blocks_are_refused_under_tensor_parallelism() -> None:
    narrow = replace(QWEN_7B, hidden_size=3584 + 64)
    assert problems(spec=narrow, fp8="blockwise") == []
    (found,) = problems(spec=narrow, fp8="blockwise", parallel={"tensor": 2})
    assert "`trainer.parallel.tensor` = 2" in found and "hidden size 3648" in found


def test_the_checks_of_a_run_refuse_fp8_on_a_cpu(write_config: Callable[[str], Path], node: NodeResources) -> None:
    with pytest.raises(ConfigError, match=r"`trainer\.fp8` = blockwise: a trainer on a CPU has no FP8 products"):
        check_run(load(RunConfig, write_config(""), ["trainer.fp8=blockwise"]), [node])


def warnings(format: Format, fp8: str = "blockwise_param", spec: ModelSpec = QWEN_7B) -> list[str]:
    trainer = TrainerConfig.model_validate({"fp8": fp8, "optimizer": DISTRIBUTED})
    return fp8_warnings(spec, trainer, WeightFormat(name=format))


def test_weights_that_are_rounded_twice_cause_a_warning() -> None:
    assert warnings("bf16") == warnings("fp8_block") == warnings("int8", fp8="blockwise") == []
    (found,) = warnings("int8")
    assert "`engine.format` = int8" in found and "fp8_block sends" in found
    (found,) = warnings("fp8_block", spec=replace(QWEN_7B, head_dim=64, num_heads=56))
    assert "blockwise_param: k_proj, v_proj have other blocks" in found
