"""Imports go left only; heavy libraries appear only where the design lets them. Read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parent.parent
LINE = ("history", "rollout", "megatron_rl", "launcher")
"""Data goes right, imports go left."""

VLLM_ADAPTERS = {
    "rollout/engine.py",
    "rollout/engine_config.py",
    "rollout/engine_responses.py",
    "rollout/llm_handle.py",
    "rollout/cpu_executor.py",
    "rollout/proposer.py",
    "rollout/loaded_weights.py",
    "rollout/receiver.py",
    "rollout/replay.py",
    "rollout/slices.py",
    "rollout/exact_int8.py",
    "rollout/fp8_emulation.py",
    "rollout/vllm_compat.py",
    "rollout/sampler.py",
    "rollout/vllm_quirks.py",
    "rollout/worker.py",
}
RAY_USERS = {
    "history/service.py",
    "launcher/processes.py",
    "launcher/prompt_loading.py",
    "launcher/recorder.py",
    "launcher/run.py",
    "launcher/sft.py",
    "megatron_rl/spmd.py",
    "megatron_rl/trainer_actor.py",
    "megatron_rl/trainer_group.py",
    "rollout/engine_actor.py",
    "rollout/engine_group.py",
    "rollout/history_outbox.py",
    "rollout/pool.py",
    "rollout/scorer_pool.py",
    "rollout/scoring.py",
}
PURE = {
    "rollout/config.py",
    "rollout/types.py",
    "rollout/weight_format.py",
    "rollout/weight_sums.py",
    "rollout/wire.py",
    "rollout/planner.py",
    "rollout/plan.py",
    "rollout/policies.py",
    "rollout/dispatcher.py",
    "rollout/admission.py",
    "history/length_book.py",
    "rollout/seeds.py",
    "rollout/prompt_order.py",
    "rollout/evaluation.py",
    "megatron_rl/config.py",
    "megatron_rl/model_config.py",
    "megatron_rl/memory.py",
    "megatron_rl/slots.py",
    "megatron_rl/batching.py",
    "megatron_rl/balancing.py",
    "megatron_rl/packing_kernels.py",
    "megatron_rl/exchange_kernels.py",
    "megatron_rl/cost_model.py",
    "megatron_rl/advantages.py",
    "megatron_rl/phases.py",
    "megatron_rl/results.py",
    "megatron_rl/step_metrics.py",
    "megatron_rl/imitation.py",
    "megatron_rl/probe_prompt.py",
    "megatron_rl/trainer_spec.py",
    "megatron_rl/weights/names.py",
    "megatron_rl/weights/primary_plan.py",
    "megatron_rl/weights/reshard.py",
    "megatron_rl/weights/publish_report.py",
    "megatron_rl/weights/publish_refusal.py",
    "megatron_rl/weights/weight_files.py",
    "rollout/failures.py",
    "megatron_rl/timeline.py",
    "rollout/engine_spec.py",
    "rollout/engine_speed.py",
    "rollout/engine_trace.py",
}
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "wandb", "matplotlib")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Top-level package of every import in a file, those inside functions included; no relative import is used."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} has a relative import"
            yield (node.module or "").partition(".")[0]


def users(library: str) -> set[str]:
    return {name_of(path) for package in LINE for path in sources(package) if library in imports(path)}


@pytest.mark.parametrize("package", LINE)
def test_imports_go_left_only(package: str) -> None:
    right = set(LINE[LINE.index(package) + 1 :])
    wrong = {name_of(path): right & set(imports(path)) for path in sources(package) if right & set(imports(path))}
    assert wrong == {}


def test_nothing_in_the_packages_imports_tests_benchmarks_or_examples() -> None:
    assert users("tests") | users("benchmarks") | users("examples") == set()


def test_megatron_is_imported_only_under_megatron_rl() -> None:
    assert {name for name in users("megatron") if not name.startswith("megatron_rl/")} == set()


def test_vllm_is_imported_only_by_its_adapters() -> None:
    assert users("vllm") <= VLLM_ADAPTERS


def test_ray_is_imported_only_where_processes_are_made() -> None:
    assert users("ray") <= RAY_USERS


def test_torch_is_not_imported_by_history_launcher_or_pure_modules() -> None:
    assert {name for name in users("torch") if name.startswith(("history/", "launcher/")) or name in PURE} == set()


def test_pure_modules_exist() -> None:
    assert {name for name in PURE if not (ROOT / name).exists()} == set()


def test_pure_modules_import_nothing_heavy_directly_or_through_others() -> None:
    modules = [name.removesuffix(".py").replace("/", ".") for name in sorted(PURE)]
    code = f"import {', '.join(modules)}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_the_controllers_process_imports_no_torch_vllm_or_megatron() -> None:
    code = "import megatron_rl.controller, sys; print([n for n in ('torch', 'vllm', 'megatron') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("package", LINE)
def test_importing_a_package_has_no_effects(package: str) -> None:
    code = f"import {package}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
