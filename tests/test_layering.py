"""Imports go left only; heavy libraries appear only where the design lets them. Read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parent.parent
LINE = ("history", "rollout", "megatron_rl", "launcher")
"""Data goes right, imports go left."""

VLLM_ADAPTERS = {
    "rollout/cpu/quirks.py",
    "rollout/engine/engine.py",
    "rollout/engine/vllm_args.py",
    "rollout/engine/responses.py",
    "rollout/engine/async_llm.py",
    "rollout/cpu/executor.py",
    "rollout/worker/proposer.py",
    "rollout/worker/loaded_sums.py",
    "rollout/worker/receiver.py",
    "rollout/worker/loader_replay.py",
    "rollout/worker/loader_recording.py",
    "rollout/worker/exact_int8.py",
    "rollout/cpu/fp8_kernels.py",
    "rollout/worker/vllm_compat.py",
    "rollout/worker/sampler.py",
    "rollout/worker/vllm_quirks.py",
    "rollout/worker/worker.py",
}
RAY_USERS = {
    "history/store/service.py",
    "launcher/cluster/processes.py",
    "launcher/commands/prompts.py",
    "launcher/run_dir/recorder.py",
    "launcher/commands/run.py",
    "launcher/commands/sft.py",
    "megatron_rl/trainer/group.py",
    "megatron_rl/trainer/actor.py",
    "rollout/engine/actor.py",
    "rollout/pool/engine_group.py",
    "rollout/engine/history_sender.py",
    "rollout/pool/engine_pool.py",
    "rollout/pool/scorer_pool.py",
    "rollout/rewards/scorer.py",
}
PURE = {
    "rollout/config.py",
    "rollout/types.py",
    "rollout/weights/format.py",
    "rollout/weights/fingerprint_sums.py",
    "rollout/weights/manifest.py",
    "rollout/planning/planner.py",
    "rollout/planning/plan.py",
    "rollout/planning/policies.py",
    "rollout/planning/dispatcher.py",
    "rollout/planning/admission.py",
    "history/lengths/book.py",
    "rollout/seeds.py",
    "rollout/data/order.py",
    "rollout/evaluation.py",
    "megatron_rl/config.py",
    "megatron_rl/model/spec.py",
    "megatron_rl/memory.py",
    "megatron_rl/ranks.py",
    "megatron_rl/batching/batch.py",
    "megatron_rl/batching/balance.py",
    "megatron_rl/batching/packing_kernels.py",
    "megatron_rl/batching/exchange_kernels.py",
    "megatron_rl/batching/cost_model.py",
    "megatron_rl/algorithm/advantages.py",
    "megatron_rl/controller/phases.py",
    "megatron_rl/trainer/results.py",
    "megatron_rl/controller/step_metrics.py",
    "megatron_rl/batching/sft_batch.py",
    "megatron_rl/trainer/spec.py",
    "megatron_rl/weights/shards.py",
    "megatron_rl/weights/fp8_passthrough.py",
    "megatron_rl/weights/reshard_plan.py",
    "megatron_rl/controller/publish_report.py",
    "megatron_rl/controller/publish_refusal.py",
    "megatron_rl/weights/weight_files.py",
    "rollout/failures.py",
    "rollout/tracing/timeline.py",
    "rollout/engine/spec.py",
    "rollout/tracing/engine_speed.py",
    "rollout/tracing/forwards.py",
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
    names = ("torch", "vllm", "megatron")
    code = f"import megatron_rl.controller.controller, sys; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("package", LINE)
def test_importing_a_package_has_no_effects(package: str) -> None:
    code = f"import {package}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
