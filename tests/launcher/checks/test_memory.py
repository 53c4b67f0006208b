import json
from pathlib import Path

import pytest

from launcher.checks.memory import MemoryPlan, device_phases, run_memory
from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig
from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.memory import engine_rank, kv_bytes_per_token, num_parameters, trainer_rank, weight_bytes
from megatron_rl.model.spec import ModelSpec, read_model_spec
from rollout.weights.format import WeightFormat

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}


def spec_of(tmp_path: Path, **more: object) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "model_type": "qwen3", **more}))
    return read_model_spec(tmp_path)


def plan_of(config: RunConfig, spec: ModelSpec, node: NodeResources) -> MemoryPlan:
    return run_memory(config, spec, WeightFormat.of(config.engine), node)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_the_number_of_parameters_equals_that_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(SHAPE) if family != "qwen2" else {**SHAPE, "head_dim": 16}
    if family == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = AutoConfig.for_model(family, **shape, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "model_type": family}, default=str))
    assert num_parameters(read_model_spec(tmp_path)) == sum(parameter.numel() for parameter in model.parameters())


def test_int8_halves_the_linear_layers_and_nothing_else(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    linear = 3 * (64 * (4 + 2 + 2 + 4) * 32 + 3 * 64 * 96)
    scales = 3 * 4 * ((4 + 2 + 2) * 32 + 64 + 2 * 96 + 64)
    bf16, int8 = (weight_bytes(spec, WeightFormat(name=name)) for name in ("bf16", "int8"))
    assert bf16 == 2 * num_parameters(spec)
    assert bf16 - int8 == linear - scales
    but_one = WeightFormat(name="int8", bf16_last_layers=1)
    assert bf16 - weight_bytes(spec, but_one) == (linear - scales) * 2 / 3


def test_keys_and_values_of_a_token_have_the_expected_bytes(tmp_path: Path) -> None:
    assert kv_bytes_per_token(spec_of(tmp_path), tensor_parallel=1) == 3 * 2 * 2 * 32 * 2
    assert kv_bytes_per_token(spec_of(tmp_path), tensor_parallel=2) == 3 * 2 * 1 * 32 * 2


def test_each_named_setting_shrinks_its_item(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    base = TrainerConfig(parallel=ParallelConfig(data=2), max_micro_batch_tokens=4096)

    def item(what: str, trainer: TrainerConfig) -> int:
        return next(one.num_bytes for one in trainer_rank(spec, trainer, longest_sample=10) if one.what == what)

    smaller = {
        "parameters": base.model_copy(update={"parallel": ParallelConfig(data=2, tensor=2)}),
        "gradients": base.model_copy(update={"parallel": ParallelConfig(data=2, tensor=2)}),
        "optimizer": base.model_copy(update={"optimizer": base.optimizer.model_copy(update={"distributed": True})}),
        "activations": base.model_copy(update={"max_micro_batch_tokens": 2048}),
        "logits": base.model_copy(update={"logprob_chunk_tokens": 512}),
    }
    for what, trainer in smaller.items():
        assert item(what, trainer) < item(what, base)


def test_fp32_training_of_the_model_holds_sixteen_bytes_a_parameter(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    items = {item.what: item.num_bytes for item in trainer_rank(spec, TrainerConfig(dtype="fp32"), longest_sample=10)}
    held = items["parameters"] + items["gradients"] + items["optimizer"]
    assert held == 16 * num_parameters(spec)


def test_fp8_parameters_need_the_bytes_of_bf16_and_fp8_copies_need_them_again(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, hidden_size=1024, intermediate_size=4096)
    linear = 3 * (1024 * (4 + 2 + 2 + 4) * 32 + 3 * 1024 * 4096)
    scales = 2 * 4 * linear // (128 * 128)

    def parameters(fp8: str, tensor: int = 1) -> int:
        trainer = TrainerConfig.model_validate({"fp8": fp8, "parallel": {"tensor": tensor}})
        return next(one.num_bytes for one in trainer_rank(spec, trainer, longest_sample=10) if one.what == "parameters")

    assert parameters("none") == 2 * num_parameters(spec)
    assert parameters("blockwise_param") == parameters("none") + scales
    assert parameters("blockwise") == parameters("none") + 2 * linear + scales
    assert parameters("blockwise", tensor=2) - parameters("none", tensor=2) == (2 * linear + scales) // 2


def test_the_memory_bound_on_gpus_is_that_of_a_device(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x"}]}, "engine": {"num_engines": 4}}
    )
    node = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(80 << 30, 80 << 30))
    memory = plan_of(config, spec_of(tmp_path), node)
    assert memory.available_bytes == 80 << 30
    kept = next(item for item in memory.items if item.what == "engine keys and values")
    assert kept.num_bytes == 2 * config.engine.kv_cache_bytes


def phases_of(tmp_path: Path, **parts: object) -> dict[str, dict[str, int]]:
    """Bytes by phase and item, for a trainer rank and an engine rank that share a device."""
    base = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x"}]}}
    config = RunConfig.model_validate({**base, **parts})
    spec = spec_of(tmp_path)
    trainer = trainer_rank(spec, config.trainer, longest_sample=10)
    engine = engine_rank(
        spec, weight_format=WeightFormat(name="bf16"), tensor_parallel=1, kv_cache_bytes=config.engine.kv_cache_bytes
    )
    found = device_phases(config, trainer, engine)
    return {phase: {item.what: item.num_bytes for item in items} for phase, items in found.items()}


SAMPLES, TRAINS, TRAVELS = "while engines sample", "while the trainer trains", "during a publish"


def test_an_offloaded_side_is_not_on_the_device_while_the_other_works(tmp_path: Path) -> None:
    beside = phases_of(tmp_path)
    assert {"trainer optimizer", "engine keys and values"} <= set(beside[SAMPLES]) & set(beside[TRAINS])
    in_turns = phases_of(tmp_path, engine={"sleep_level": 2}, trainer={"offload": "all"})
    assert not any(what.startswith("trainer") for what in in_turns[SAMPLES])
    assert not any(what.startswith("engine") for what in in_turns[TRAINS])
    assert {what for what in in_turns[TRAVELS] if what.startswith("trainer")} == {"trainer parameters"}
    assert {what for what in in_turns[TRAVELS] if what.startswith("engine")} == {"engine weights"}
    for phase in (SAMPLES, TRAINS, TRAVELS):
        assert sum(in_turns[phase].values()) < sum(beside[phase].values())


def test_a_publish_needs_a_staged_copy_or_two_buckets_and_deltas_need_baselines(tmp_path: Path) -> None:
    staged = phases_of(tmp_path)[TRAVELS]
    assert staged["weights in transit"] == staged["engine weights"]
    assert "weights in transit" not in phases_of(tmp_path, publish={"transport": "shm"})[TRAVELS]
    publish = {"transport": "auto", "delta": True, "bucket_bytes": 1 << 20}
    apart = phases_of(tmp_path, publish=publish, placement={"mode": "disaggregated"})
    assert set(apart) == {"an engine's device", "a trainer rank's device"}
    for items in apart.values():
        assert items["buckets in transit"] == 2 << 20
        assert items["publish baselines"] == staged["engine weights"]
    assert not any(what.startswith("engine") for what in apart["a trainer rank's device"])


def test_a_model_that_fits_only_with_offloading_is_refused_naming_the_largest_item(tmp_path: Path) -> None:
    base = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x"}]}}
    spec = spec_of(tmp_path, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, vocab_size=150_000)
    node = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(140 << 30,))
    small = {"max_micro_batch_tokens": 1024}
    beside = RunConfig.model_validate({**base, "engine": {"kv_cache_bytes": 40 << 30}, "trainer": small})
    (problem,) = plan_of(beside, spec, node).problems()
    assert "the smallest GPU, during a publish" in problem
    assert "trainer.optimizer.distributed" in problem
    turns = {"engine": {"kv_cache_bytes": 40 << 30, "sleep_level": 2}, "trainer": {"offload": "all", **small}}
    assert plan_of(RunConfig.model_validate({**base, **turns}), spec, node).problems() == []


def test_the_history_is_planned_with_its_budget_or_all_tokens_of_a_short_run(tmp_path: Path) -> None:
    node = NodeResources(cpu_cores=2, available_bytes=1 << 40, gpu_bytes=())

    def items(**more: object) -> dict[str, int]:
        base = {"model": "m", "run_dir": "r", "num_steps": 2, "data": {"train": [{"path": "x"}]}}
        sizes = {"algorithm": {"prompts_per_step": 4, "group_size": 8}, "sampling": {"max_response_tokens": 100}}
        config = RunConfig.model_validate({**base, **sizes, **more})
        return {item.what: item.num_bytes for item in plan_of(config, spec_of(tmp_path), node).items}

    short = items()
    assert short["history"] >= 2 * 4 * 8 * 100 * 4
    assert short["history segments"] == 2 * 4 * 8 * 100 * 8
    assert items(num_steps=10**6)["history"] == 2 << 30
    assert items(num_steps=10**6, history={"budget_bytes": 1 << 20})["history"] == 1 << 20
    assert items(history={"num_shards": 3})["history processes"] == 2 * short["history processes"]
    for more in ({"deterministic": True}, {"history": {"drafts": False}}, {"history": {"baseline_engines": [0]}}):
        assert not any(what.startswith("history") for what in items(**more))


@pytest.mark.parametrize("num_engines", [1, 4])
def test_trainer_and_engines_hold_the_last_publish_for_deltas(tmp_path: Path, num_engines: int) -> None:
    base = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x"}]}}
    config = RunConfig.model_validate({**base, "publish": {"delta": True}, "engine": {"num_engines": num_engines}})
    spec = spec_of(tmp_path)
    items = plan_of(config, spec, NodeResources(cpu_cores=8, available_bytes=1 << 40, gpu_bytes=())).items
    kept = next(item for item in items if item.what == "publish baselines")
    assert kept.num_bytes == (1 + num_engines) * weight_bytes(spec, WeightFormat.of(config.engine))
    assert kept.knob == "publish.delta"
