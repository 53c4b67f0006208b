"""Where the trainer's attention is unfused, the plan counts scores and says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from examples.recipes.plans import load_recipe, options
from launcher.checks.fit import fit
from launcher.cluster.node import NodeResources
from launcher.commands.plan import planned, planned_nodes
from launcher.estimate.trainer_kernels import attention_warnings, trainer_kernels
from megatron_rl.activations import most_pairs
from megatron_rl.config import TrainerConfig
from megatron_rl.model.spec import read_model_spec

GPU = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(80 << 30,))
CPU = replace(GPU, gpu_bytes=())
BF16, FP32 = TrainerConfig(), TrainerConfig(dtype="fp32")


@pytest.mark.parametrize(
    ("capability", "flash_attention", "kernels"),
    [
        (None, "", "fused"),
        ((9, 0), "", "fused"),
        ((10, 0), "", "fused"),
        ((8, 0), "", "unfused"),
        ((8, 9), "", "unfused"),
        ((12, 0), "", "unfused"),
        ((8, 0), "2.1.1", "fused"),
        ((8, 9), "2.7.4.post1", "fused"),
        ((8, 0), "2.8.3", "fused"),
        ((12, 0), "2.8.3", "fused"),
        ((8, 0), "2.1.0", "unfused"),
        ((8, 0), "2.8.3.post1", "unfused"),
        ((8, 0), "2.10.0", "unfused"),
        ((12, 0), "2.7.2", "unfused"),
        ((7, 5), "2.8.3", "unfused"),
        ((8, 0), "unknown", "unfused"),
    ],
)
def test_attention_is_fused_where_transformer_engine_has_a_kernel(
    capability: tuple[int, int] | None, flash_attention: str, kernels: str
) -> None:
    node = replace(GPU, gpu_capability=capability)
    assert trainer_kernels(BF16, node, flash_attention=flash_attention) == kernels
    assert trainer_kernels(FP32, node, flash_attention=flash_attention) == "unfused"
    assert trainer_kernels(BF16, CPU, flash_attention=flash_attention) == "local"


def test_an_a100_without_flash_attention_holds_scores_and_the_plan_names_the_package() -> None:
    recipe = load_recipe("grpo-qwen2.5-7b-int8-1n8g-a100")
    report, _, _ = planned(recipe, options())
    assert report.fitted is not None and not report.problems
    assert any("`flash-attn` 2.1.1 to 2.8.3" in warning for warning in report.warnings)
    (device,) = (table for table in report.fitted.memory.tables if table.kind == "device")
    train = {item.what: item.num_bytes for item in device.phases["train"]}
    # 28 heads over 4 ranks, in one layer
    assert train["trainer attention scores"] == 12 * 7 * most_pairs(recipe.trainer, 1024 + 8192)
    assert not any("scores" in item.what for item in device.phases["rollout"]), "the trainer is offloaded"


def test_a_run_whose_python_has_flash_attention_holds_no_scores() -> None:
    changed = ("trainer.recompute=none", "trainer.parallel.tensor=2", "trainer.parallel.data=4")
    recipe = load_recipe("grpo-qwen2.5-7b-int8-1n8g-a100", *changed)
    nodes, spec = planned_nodes(recipe, options()), read_model_spec(Path(recipe.model))
    without: list[str] = []
    fit(recipe, spec, nodes, without)
    assert "attention scores" in without[0] or "GiB are needed" in without[0]
    present: list[str] = []
    fitted = fit(recipe, spec, nodes, present, flash_attention="2.8.3")
    assert fitted is not None and not present
    assert not any("scores" in line for line in fitted.memory.lines())
    assert attention_warnings(recipe.trainer, nodes[0], flash_attention="2.8.3") == []


def test_selective_recomputation_of_fused_attention_causes_a_warning() -> None:
    selective = TrainerConfig(recompute="selective")
    hopper, ampere = (replace(GPU, gpu_capability=capability) for capability in ((9, 0), (8, 0)))
    (found,) = attention_warnings(selective, hopper)
    assert "`trainer.recompute` = selective" in found and "set it to none" in found
    assert attention_warnings(BF16, hopper) == attention_warnings(selective, CPU) == []
    (found,) = attention_warnings(selective, ampere)
    assert "compute capability 8.0" in found and "`flash-attn`" in found
    (found,) = attention_warnings(FP32, hopper)
    assert "`trainer.dtype` = fp32" in found


def test_fp32_is_to_become_bf16_only_where_that_fuses_attention() -> None:
    def fix(capability: tuple[int, int], flash_attention: str = "") -> str:
        node = replace(GPU, gpu_capability=capability)
        (found,) = attention_warnings(FP32, node, flash_attention=flash_attention)
        return found.partition("pair of positions")[2]

    assert fix((9, 0)) == fix((8, 0), "2.8.3") == "; set it to bf16 for fused attention"
    needed = "; set it to bf16 and install `flash-attn` {} to 2.8.3 on every node for fused attention"
    assert fix((8, 0)) == fix((8, 0), "2.1.0") == needed.format("2.1.1")
    assert fix((12, 0)) == needed.format("2.7.3")
    assert fix((7, 5)) == ""


def test_an_unknown_flash_attention_counts_as_installed_and_is_named() -> None:
    ampere, turing = (replace(GPU, gpu_capability=capability) for capability in ((8, 0), (7, 5)))
    assert trainer_kernels(BF16, ampere, flash_attention=None) == "fused"
    assert trainer_kernels(BF16, turing, flash_attention=None) == "unfused"
    assert trainer_kernels(FP32, ampere, flash_attention=None) == "unfused"
    for trainer in (BF16, TrainerConfig(recompute="selective")):
        (found,) = attention_warnings(trainer, ampere, flash_attention=None)
        assert "`flash-attn` 2.1.1 to 2.8.3" in found and "packages of the container are unknown" in found
    assert attention_warnings(BF16, replace(GPU, gpu_capability=(9, 0)), flash_attention=None) == []
