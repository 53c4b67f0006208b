"""The size of the KV cache that a memory plan leaves."""

from dataclasses import replace
from pathlib import Path

import pytest

from examples.recipes.plans import load_recipe, options
from launcher.checks.fit import fit
from launcher.checks.kv_cache import (
    GRAIN_BYTES,
    cache_problems,
    evaluation_engine,
    evaluation_problems,
    fraction_problems,
    sized,
)
from launcher.checks.memory import run_memory
from launcher.checks.model import engine_problems
from launcher.cluster.node import NodeResources
from launcher.cluster.placement import plan
from launcher.commands.plan import planned_nodes
from launcher.commands.slurm import job_config
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import RunConfig
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.run_tables import run_tables
from megatron_rl.model.spec import read_model_spec

RECIPE = "grpo-qwen3-32b-4n8g"
TURNS = {"sleep_level": 2, "offload": "all"}


def planned(fraction: float | None, **keys: str | int) -> tuple[PlannedRun, tuple[NodeResources, ...]]:
    """A recipe that leaves the size of the cache to the plan."""
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    config = load_recipe(RECIPE, *overrides)
    engine = config.engine.model_dump(exclude={"kv_cache_bytes"}) | {"gpu_memory_fraction": fraction}
    config = RunConfig.model_validate(config.model_dump() | {"engine": engine})
    nodes = planned_nodes(config, options())
    spec = read_model_spec(Path(config.model))
    return PlannedRun(config=config, spec=spec, placement=plan(config, nodes)), nodes


def fullest(run: PlannedRun, nodes: tuple[NodeResources, ...]) -> float:
    """Largest share of a device that is needed."""
    tables = [table for table in run_tables(run, nodes) if table.kind == "device"]
    return max(table.needed_bytes / table.available_bytes for table in tables)


@pytest.mark.parametrize("fraction", [0.7, 0.9, 1.0])
def test_the_cache_takes_what_the_plan_leaves_and_no_more(fraction: float) -> None:
    run, nodes = planned(fraction, trainer__max_micro_batch_tokens=4096, trainer__recompute="full")
    found = sized(run, nodes).config.engine
    assert found.gpu_memory_fraction is None and found.kv_cache_bytes % GRAIN_BYTES == 0

    def share(kv_cache_bytes: int) -> float:
        engine = found.model_copy(update={"kv_cache_bytes": kv_cache_bytes})
        return fullest(replace(run, config=run.config.model_copy(update={"engine": engine})), nodes)

    assert share(found.kv_cache_bytes) <= fraction < share(found.kv_cache_bytes + GRAIN_BYTES)


def test_engines_that_sleep_beside_an_offloaded_trainer_have_more_room() -> None:
    caches = []
    for changed in ({}, {"engine__sleep_level": 0, "trainer__offload": "none"}):
        run, nodes = planned(0.95, trainer__recompute="full", trainer__parallel__data=2, **changed)
        caches.append(sized(run, nodes).config.engine.kv_cache_bytes)
    assert caches[0] > caches[1] + (10 << 30)


def test_a_run_without_a_fraction_keeps_its_cache() -> None:
    run, nodes = planned(None)
    assert sized(run, nodes) is run


def test_the_whole_check_uses_the_size_and_judges_the_longest_sample_by_it() -> None:
    run, nodes = planned(0.9)
    problems: list[str] = []
    found = fit(run.config, run.spec, nodes, problems)
    assert problems == [] and found is not None and found.config.engine.kv_cache_bytes > 30 << 30
    run, nodes = planned(0.1)
    assert fit(run.config, run.spec, nodes, problems) is not None
    assert any(
        "bytes of keys and values, but `engine.gpu_memory_fraction` = 0.1 leaves 67108864; raise it" in each
        for each in problems
    )


def test_a_phase_without_keys_and_values_does_not_shrink_the_cache() -> None:
    """The trainer alone needs more than the fraction, while engines sleep."""
    large = {"trainer__recompute": "full", "trainer__max_micro_batch_tokens": 65536}
    run, nodes = planned(0.55, **large)
    found = sized(run, nodes)
    (table,) = (table for table in run_tables(found, nodes) if table.kind == "device")
    shares = {phase: table.total_bytes(phase) / table.available_bytes for phase in table.phases}
    assert shares["train"] > shares["publish"] > 0.55 >= shares["rollout"] > 0.54
    assert found.config.engine.kv_cache_bytes > 10 << 30
    assert fraction_problems(run, nodes) == []
    smaller, _ = planned(0.55, **large | {"trainer__max_micro_batch_tokens": 8192})
    assert sized(smaller, nodes).config.engine.kv_cache_bytes == found.config.engine.kv_cache_bytes


def test_a_fraction_that_leaves_no_room_beside_the_trainer_is_refused_with_the_phase_and_the_fraction_needed() -> None:
    awake = {"trainer__recompute": "full", "engine__sleep_level": 0, "trainer__offload": "none"}
    run, nodes = planned(0.55, **awake)
    (problem,) = fraction_problems(run, nodes)
    assert problem.startswith("`engine.gpu_memory_fraction` = 0.55 leaves nothing to the KV cache: a device with ")
    assert " of 79.18 GiB in `publish` with the smallest cache; raise the fraction to 0." in problem
    assert "or change `engine.tensor_parallel` (weights in transit: " in problem
    enough = float(problem.partition("raise the fraction to ")[2].partition(" ")[0])
    assert fraction_problems(planned(enough, **awake)[0], nodes) == []
    assert fraction_problems(planned(enough - 0.01, **awake)[0], nodes) != []
    problems: list[str] = []
    assert fit(run.config, run.spec, nodes, problems) is not None
    assert problem in problems


def test_a_device_that_is_too_small_for_a_phase_is_refused_by_the_plan_alone() -> None:
    run, nodes = planned(0.9, trainer__parallel__tensor=1, trainer__parallel__data=8, trainer__offload="none")
    assert fraction_problems(run, nodes) == []
    assert run_memory(sized(run, nodes), nodes).problems()


@pytest.mark.parametrize("fraction", [0.9, 1.0])
def test_a_device_that_is_too_small_is_not_met_by_a_larger_fraction(fraction: float) -> None:
    run, nodes = planned(fraction, trainer__parallel__tensor=1, trainer__parallel__data=8, trainer__offload="none")
    problems: list[str] = []
    fit(run.config, run.spec, nodes, problems)
    assert any("trainer.offload" in each for each in problems)
    assert not any("raise it" in each or "gpu_memory_fraction" in each for each in problems)


def test_a_sample_beyond_the_cache_of_the_whole_device_must_be_shorter() -> None:
    run, _ = planned(1.0)
    engine = run.config.engine.model_copy(update={"gpu_memory_fraction": None, "kv_cache_bytes": GRAIN_BYTES})
    problems = engine_problems(run.spec, engine, 2048, {"sampling.max_response_tokens": 30000}, fraction=1.0)
    assert problems and all(each.endswith("= 1 leaves 67108864; lower one of them") for each in problems)


def test_the_engines_of_the_bf16_evaluation_have_the_cache_that_their_weights_leave() -> None:
    """Weights of 15 GiB a rank, a reserve of a twentieth, and estimates for logits, graphs and contexts."""
    config = load_recipe("dapo-qwen2.5-32b-16n8g")
    spec, nodes = read_model_spec(Path(config.model)), planned_nodes(config, options())
    engine = evaluation_engine(config, spec, nodes)
    assert (engine.format, engine.kv_format, engine.sleep_level) == ("bf16", "bf16", 0)
    weights = 2 * 32.76e9 / engine.tensor_parallel
    left = nodes[0].gpu_bytes[0] / 1.05 - weights
    assert left - (12 << 30) < engine.kv_cache_bytes < left - (2 << 30)
    assert evaluation_problems(config, spec, nodes) == []
    small = config.model_copy(update={"engine": config.engine.model_copy(update={"kv_cache_bytes": 8 << 30})})
    assert evaluation_engine(small, spec, nodes).kv_cache_bytes == 8 << 30


def test_a_run_whose_model_could_not_be_evaluated_in_bf16_is_refused_before_it_begins() -> None:
    config = load_recipe("dapo-qwen2.5-32b-16n8g", "engine.tensor_parallel=1", "engine.num_engines=128")
    spec = read_model_spec(Path(config.model))
    nodes = [replace(node, gpu_bytes=(68 << 30,) * 8) for node in planned_nodes(config, options())]
    (problem, *_) = evaluation_problems(config, spec, nodes)
    assert "`evaluation.bf16_before_after` = true: BF16 weights leave " in problem
    assert problem.endswith("; set bf16_before_after to false")
    off = config.evaluation.model_copy(update={"bf16_before_after": False})
    assert evaluation_problems(config.model_copy(update={"evaluation": off}), spec, nodes) == []


def test_both_keys_and_a_machine_without_gpus_are_refused() -> None:
    config = load_recipe(RECIPE, "engine.gpu_memory_fraction=0.9")
    none = NodeResources(cpu_cores=8, available_bytes=1 << 40, gpu_bytes=())
    both, no_gpu = cache_problems(config, none)
    assert "both size the KV cache; remove one of them" in both
    assert "no GPU; set `engine.kv_cache_bytes` instead" in no_gpu


def test_a_job_reads_back_a_configuration_whose_cache_takes_a_share_of_the_device(tmp_path: Path) -> None:
    """Also without the bytes that the user has not named."""
    run, nodes = planned(0.9)
    given = run.config.engine.model_dump(exclude={"kv_cache_bytes"})
    config = RunConfig.model_validate(run.config.model_dump() | {"engine": given})
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(job_config(config)), encoding="utf-8")
    again = load(RunConfig, str(path), [])
    assert again == job_config(config) and cache_problems(again, nodes[0]) == []
