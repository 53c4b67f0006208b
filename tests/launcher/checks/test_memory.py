"""Memory of a run by device, node and phase, and the changes that a refusal names."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.recipes.plans import load_recipe, options
from history.index.segment import file_bytes
from history.types import PastResponse
from launcher.checks.memory import MemoryPlan, Shortage, allocator_problems, run_memory, store_warnings
from launcher.cluster.node import NodeResources
from launcher.cluster.placement import plan
from launcher.commands.plan import planned_nodes
from launcher.config.schema import RunConfig
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.tables import MemoryTable
from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.memory import (
    FurtherSpecs,
    checkpoint_bytes,
    engine_rank,
    kv_bytes_per_token,
    num_parameters,
    trainer_rank,
    trainer_stages,
    weight_bytes,
)
from megatron_rl.model.spec import ModelSpec, read_model_spec
from rollout.config import DRAFTED_TOKENS, EngineConfig
from rollout.weights.format import WeightFormat
from tests.launcher.estimate.runs import tightest

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
BASE = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x"}]}}
GPU = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(80 << 30,))
CPU = NodeResources(cpu_cores=8, available_bytes=1 << 40, gpu_bytes=())


def spec_of(tmp_path: Path, **more: object) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "model_type": "qwen3", **more}))
    return read_model_spec(tmp_path)


def plan_of(spec: ModelSpec, node: NodeResources, **parts: object) -> MemoryPlan:
    config = RunConfig.model_validate({**BASE, **parts})
    placement = plan(config, [node])
    return run_memory(PlannedRun(config=config, spec=spec, placement=placement), [node])


def phases(table: MemoryTable) -> dict[str, dict[str, int]]:
    """Bytes by phase and item."""
    return {phase: {item.what: item.num_bytes for item in items} for phase, items in table.phases.items()}


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
    assert kv_bytes_per_token(spec_of(tmp_path), tensor_parallel=2, kv_format="fp8") == 3 * 2 * 1 * 32


def test_each_named_setting_shrinks_its_item(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    base = TrainerConfig(parallel=ParallelConfig(data=2), max_micro_batch_tokens=4096)

    def item(what: str, trainer: TrainerConfig) -> int:
        return next(one.num_bytes for one in trainer_rank(spec, trainer, longest_sample=10) if one.what == what)

    cut = base.model_copy(update={"parallel": ParallelConfig(data=2, tensor=2)})
    smaller = {
        "parameters": cut,
        "gradients": cut,
        "output gradient": cut,
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


def test_full_recomputation_keeps_an_input_a_layer_and_one_layer(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)

    def activations(recompute: str) -> int:
        trainer = TrainerConfig.model_validate({"recompute": recompute, "max_micro_batch_tokens": 100})
        return next(
            one.num_bytes for one in trainer_rank(spec, trainer, longest_sample=10) if one.what == "activations"
        )

    layer = 5 * 64 + (2 * 4 + 2 * 2) * 32 + (4 + 2) * 32 + 3 * 96
    assert activations("none") == activations("selective") == 100 * 2 * 3 * layer
    assert activations("full") == 100 * 2 * (3 * 64 + layer)


def test_engines_need_logits_of_every_drafted_token(tmp_path: Path) -> None:
    spec, engine = spec_of(tmp_path), EngineConfig(max_num_seqs=8)

    def logits(draft_tokens: int) -> int:
        return next(
            one.num_bytes for one in engine_rank(spec, engine, draft_tokens=draft_tokens) if one.what == "logits"
        )

    assert logits(0) == 3 * 4 * 8 * 256
    assert logits(16) == 17 * logits(0)
    assert logits(10**6) == 3 * 4 * DRAFTED_TOKENS * 256


def gpu_items(spec: ModelSpec, tensor: int, draft: int, **vllm: int) -> dict[str, int]:
    """Bytes by item of an engine rank on a GPU."""
    engine = EngineConfig(tensor_parallel=tensor, max_num_seqs=64, vllm=vllm)
    return {item.what: item.num_bytes for item in engine_rank(spec, engine, draft_tokens=draft, on_gpu=True)}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    ("draft", "largest_graph", "in_graphs"),
    [(0, 128, 64), (8, 2043, 64 * 9), (16, 2040, 64 * 17), (31, 2048, 2048)],
)
def test_a_gpu_holds_attentions_partial_sums_in_graphs_and_beside_them(
    tensor: int, draft: int, largest_graph: int, in_graphs: int
) -> None:
    """32 splits of FP32 sums, for 64 heads of 128 numbers."""
    spec = read_model_spec(Path("examples/recipes/models/Qwen3-32B"))
    on_gpu = gpu_items(spec, tensor, draft)
    engine = EngineConfig(tensor_parallel=tensor, max_num_seqs=64)
    on_cpu = {item.what: item.num_bytes for item in engine_rank(spec, engine, draft_tokens=draft)}
    of_token = 32 * (64 // tensor) * 128 * 4
    assert on_gpu["CUDA graphs"] == (1 << 30) + of_token * in_graphs
    assert on_gpu["workspace"] - on_cpu["workspace"] == of_token * largest_graph
    assert "CUDA graphs" not in on_cpu
    without = gpu_items(spec, tensor, draft, enforce_eager=True)
    assert without["CUDA graphs"] == 0 and without["workspace"] == on_cpu["workspace"]


def test_graphs_grow_with_heads_of_a_rank_and_with_drafts() -> None:
    spec = read_model_spec(Path("examples/recipes/models/Qwen3-32B"))
    graphs = {(ranks, draft): gpu_items(spec, ranks, draft)["CUDA graphs"] for ranks in (1, 2) for draft in (0, 8, 16)}
    assert all(graphs[1, draft] > graphs[2, draft] for draft in (0, 8, 16))
    assert all(graphs[ranks, 0] < graphs[ranks, 8] < graphs[ranks, 16] for ranks in (1, 2))


def test_logits_on_a_gpu_are_bf16_and_sampled_in_blocks() -> None:
    """One copy, or with two ranks half a copy, the gathered halves and their order by token."""
    spec = read_model_spec(Path("examples/recipes/models/Qwen3-32B"))
    logits, block = 64 * 9 * 151_936, 3 * 4 * 2**25
    assert gpu_items(spec, 1, 8)["logits"] == 2 * logits + block
    assert gpu_items(spec, 2, 8)["logits"] == 5 * logits + block
    assert gpu_items(spec, 1, 0)["logits"] == (2 + 3 * 4) * 64 * 151_936  # fewer than a block


def test_logits_on_a_gpu_have_room_for_vllms_own_sampler() -> None:
    """It has FP32 copies of a row of each request, in no blocks."""
    spec, engine = read_model_spec(Path("examples/recipes/models/Qwen3-32B")), EngineConfig(max_num_seqs=1024)
    (logits,) = (item.num_bytes for item in engine_rank(spec, engine, on_gpu=True) if item.what == "logits")
    assert logits == 3 * 4 * 1024 * 151_936


def test_engines_that_share_a_device_count_each(tmp_path: Path) -> None:
    two = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(80 << 30, 80 << 30))
    memory = plan_of(spec_of(tmp_path), two, engine={"num_engines": 4})
    shared = {table.title: table for table in memory.tables}["device with a trainer rank and 2 engine ranks"]
    assert shared.available_bytes == 80 << 30
    assert phases(shared)["rollout"]["engine keys and values"] == 2 * (256 << 20)


def device_phases(tmp_path: Path, **parts: object) -> dict[str, dict[str, int]]:
    return phases(plan_of(spec_of(tmp_path), GPU, **parts).tables[0])


def test_an_offloaded_side_is_not_on_the_device_while_the_other_works(tmp_path: Path) -> None:
    beside = device_phases(tmp_path)
    assert {"trainer optimizer", "engine keys and values"} <= set(beside["rollout"]) & set(beside["train"])
    turns = device_phases(tmp_path, engine={"sleep_level": 2}, trainer={"offload": "all"})
    assert not any(what.startswith("trainer") for what in turns["rollout"])
    assert not any(what.startswith("engine") for what in turns["train"])
    assert "CUDA graphs" in turns["train"]
    assert {what for what in turns["publish"] if what.startswith("trainer")} == {"trainer parameters"}
    assert {what for what in turns["publish"] if what.startswith("engine")} == {"engine weights"}
    assert "trainer parameters" not in turns["wake kv"] and "engine keys and values" in turns["wake kv"]
    for phase in beside:
        assert sum(turns[phase].values()) < sum(beside[phase].values())


def test_only_offloading_returns_the_blocks_of_a_backward_pass(tmp_path: Path) -> None:
    assert "trainer activations" in device_phases(tmp_path, engine={"sleep_level": 2})["rollout"]
    assert "trainer activations" not in device_phases(tmp_path, trainer={"offload": "optimizer"})["rollout"]


def test_states_in_host_memory_are_on_the_device_in_updates_and_saves_only(tmp_path: Path) -> None:
    beside = device_phases(tmp_path)
    assert "update" not in beside
    on_host = {"optimizer": HOSTED}
    hosted = device_phases(tmp_path, trainer=on_host)
    for phase, items in hosted.items():
        on_device = phase in ("update", "save")
        assert ("trainer optimizer" in items) == on_device, phase
        assert ("trainer activations" in items) == (not on_device), phase
        assert "trainer gradients" in items and "trainer parameters" in items
    assert hosted["update"]["trainer optimizer"] == beside["train"]["trainer optimizer"]
    turns = device_phases(tmp_path, engine={"sleep_level": 2}, trainer={"offload": "all", **on_host})
    assert [*turns][2:6] == ["onload", "train", "update", "save"]
    assert [phase for phase, items in turns.items() if "trainer optimizer" in items] == ["update", "save"]
    assert not any(what.startswith("engine") for what in turns["update"])
    spec, critic = spec_of(tmp_path), {"optimizer": HOSTED}
    config = RunConfig.model_validate({**BASE, "trainer": {"critic": critic}})
    of_critic = PlannedRun(
        config=config, spec=spec, placement=plan(config, [GPU]), further=FurtherSpecs(critic=spec, reference=None)
    )
    both = phases(run_memory(of_critic, [GPU]).tables[0])
    assert [phase for phase, items in both.items() if "trainer critic optimizer" in items] == ["update", "save"]
    assert all("trainer optimizer" in items for items in both.values())


def test_every_phase_shows_the_stage_that_needs_most_in_it(tmp_path: Path) -> None:
    """The first stage keeps the activations of two micro batches; the last one has the larger optimizer."""
    spec = replace(spec_of(tmp_path), tied=False, num_layers=4)
    trainer = TrainerConfig.model_validate({"parallel": {"pipeline": 2}, "optimizer": HOSTED, "recompute": "none"})
    first, last = (
        {item.what: item.num_bytes for item in each} for each in trainer_stages(spec, trainer, longest_sample=10)
    )
    assert first["activations"] > last["activations"] and first["optimizer"] < last["optimizer"]
    two = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(80 << 30, 80 << 30))
    found = phases(plan_of(spec, two, trainer=trainer.model_dump(exclude_unset=True)).tables[0])
    assert found["train"]["trainer activations"] == first["activations"]
    assert found["update"]["trainer optimizer"] == last["optimizer"]


def test_a_save_in_the_background_copies_every_byte_of_a_checkpoint_once(tmp_path: Path) -> None:
    spec, two = spec_of(tmp_path), NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(80 << 30, 80 << 30))
    for distributed in (False, True):
        trainer = {"optimizer": {"distributed": distributed}, "parallel": {"data": 2}}
        plan = plan_of(spec, two, trainer=trainer)
        host = phases(next(table for table in plan.tables if table.kind == "host"))
        copies = host["rollout"]["checkpoint copies"]
        assert all(phase["checkpoint copies"] == copies for phase in host.values())
        # apart from the padding of the vocabulary and of buffers
        assert copies == pytest.approx(14 * num_parameters(spec), rel=0.05)
        on_cpus = next(table for table in plan_of(spec, CPU, trainer=trainer).tables if table.kind == "host")
        assert phases(on_cpus)["all phases"]["checkpoint copies"] == copies
        for node in (two, CPU):
            waiting = plan_of(spec, node, trainer=trainer, checkpoint={"background": False})
            assert not any("checkpoint copies" in phase for table in waiting.tables for phase in phases(table).values())


def test_a_publish_needs_a_staged_copy_or_two_buckets_and_deltas_need_baselines(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    weights = 2 * num_parameters(spec)
    assert device_phases(tmp_path)["publish"]["weights in transit"] == weights
    assert "weights in transit" not in device_phases(tmp_path, publish={"transport": "shm"})["publish"]
    host = phases(plan_of(spec, GPU, publish={"transport": "shm"}).tables[1])
    assert host["publish"]["weights in transit"] == weights
    two = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(80 << 30, 80 << 30))
    publish = {"transport": "nccl", "delta": True, "bucket_bytes": 1 << 20}
    apart = plan_of(spec, two, publish=publish, placement={"mode": "disaggregated"}).tables[:2]
    assert [table.title for table in apart] == ["device with a trainer rank", "device with an engine rank"]
    for table in apart:
        items = phases(table)["publish"]
        assert items["buckets in transit"] == 2 << 20
        assert items["publish baselines"] == weights
    assert not any(what.startswith("engine") for what in phases(apart[0])["publish"])


def test_a_matrix_larger_than_a_bucket_has_a_bucket_of_its_size(tmp_path: Path) -> None:
    two = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(80 << 30, 80 << 30))
    spec = spec_of(tmp_path, vocab_size=150_000, hidden_size=4096)
    table = plan_of(spec, two, placement={"mode": "disaggregated"}).tables[0]
    assert phases(table)["publish"]["buckets in transit"] == 2 * 2 * 150_000 * 4096


def test_pinned_copies_are_rounded_to_powers_of_two(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    host = phases(plan_of(spec, GPU, trainer={"offload": "all"}).tables[1])
    state = 14 * num_parameters(spec)
    assert state <= host["train"]["pinned offload"] < 2 * state
    assert host["train"]["pinned offload"] == host["rollout"]["pinned offload"]
    alone = phases(plan_of(spec, GPU, trainer={"optimizer": HOSTED}).tables[1])
    states = 12 * num_parameters(spec)
    assert states <= alone["rollout"]["pinned offload"] < 2 * states
    offloaded = [
        phases(plan_of(spec, GPU, trainer={"offload": "all", "optimizer": optimizer}).tables[1])["train"]
        for optimizer in (HOSTED, {"distributed": True})
    ]
    assert offloaded[0]["pinned offload"] == offloaded[1]["pinned offload"]


HOSTED = {"states_on_host": True, "distributed": True}
BIG = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 150_016}


def shortage_of(memory: MemoryPlan) -> Shortage:
    (shortage,) = memory.shortages
    return shortage


def test_a_refusal_names_the_phase_and_the_changes_by_effect(tmp_path: Path) -> None:
    node = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(140 << 30,))
    spec = spec_of(tmp_path, **BIG)
    small = {"max_micro_batch_tokens": 1024, "dtype": "bf16"}
    memory = plan_of(spec, node, engine={"kv_cache_bytes": 40 << 30}, trainer=small)
    shortage = shortage_of(memory)
    (problem,) = memory.problems()
    assert problem.startswith("device with a trainer rank and an engine rank: about")
    assert (
        "in `publish`, but 140.00 GiB are available; `engine.sleep_level` = 2 with trainer.offload = all frees"
        in problem
    )
    freed = [change.freed_bytes for change in shortage.changes]
    assert freed == sorted(freed, reverse=True)
    keys = {change.key for change in shortage.changes}
    assert {"trainer.offload", "engine.kv_cache_bytes", "engine.format"} <= keys
    turns = {"engine": {"kv_cache_bytes": 40 << 30, "sleep_level": 2}, "trainer": {"offload": "all", **small}}
    assert plan_of(spec, node, **turns).problems() == []


def test_a_named_change_frees_what_it_says(tmp_path: Path) -> None:
    node = NodeResources(cpu_cores=16, available_bytes=1 << 40, gpu_bytes=(140 << 30,))
    spec, engine = spec_of(tmp_path, **BIG), {"kv_cache_bytes": 40 << 30}
    memory = plan_of(spec, node, engine=engine)
    change = next(one for one in shortage_of(memory).changes if one.key == "engine.kv_cache_bytes")
    after = plan_of(spec, node, engine={"kv_cache_bytes": int(change.value)})
    assert tightest(memory).needed_bytes - tightest(after).needed_bytes == change.freed_bytes
    assert change.suffices == (not after.problems())


def test_the_history_is_planned_with_its_budget_or_all_tokens_of_a_short_run(tmp_path: Path) -> None:
    def items(**more: object) -> dict[str, int]:
        sizes = {"algorithm": {"prompts_per_step": 4, "group_size": 8}, "sampling": {"max_response_tokens": 100}}
        table = plan_of(spec_of(tmp_path), CPU, **{**sizes, "num_steps": 2, **more}).tables[0]
        return phases(table)["all phases"]

    short = items()
    assert short["history"] >= 2 * 4 * 8 * 100 * 4
    visit = [PastResponse(token_ids=np.zeros(100, np.int32), step=0, sample=sample, reward=0.0) for sample in range(8)]
    assert 2 * 4 * file_bytes(visit) <= short["history segments"] <= 2 * 4 * 2 * file_bytes(visit)
    assert items(history={"shm_bytes": 12345})["history segments"] == 12345
    assert items(num_steps=10**6)["history"] == 2 << 30
    assert items(num_steps=10**6, history={"budget_bytes": 1 << 20})["history"] == 1 << 20
    assert items(history={"num_shards": 3})["history processes"] == 2 * short["history processes"]
    for more in ({"deterministic": True}, {"history": {"drafts": False}}, {"history": {"baseline_engines": [0]}}):
        assert not any(what.startswith("history") for what in items(**more))


@pytest.mark.parametrize("num_engines", [1, 4])
def test_trainer_and_engines_hold_the_last_publish_for_deltas(tmp_path: Path, num_engines: int) -> None:
    spec = spec_of(tmp_path)
    declined = plan_of(spec, CPU, publish={"delta": True}, engine={"num_engines": num_engines})
    assert not any(item.what == "publish baselines" for item in declined.tables[0].phases["all phases"])
    publish = {"delta": True, "transport": "gloo"}
    memory = plan_of(spec, CPU, publish=publish, engine={"num_engines": num_engines})
    kept = next(item for item in memory.tables[0].phases["all phases"] if item.what == "publish baselines")
    assert kept.num_bytes == (1 + num_engines) * 2 * num_parameters(spec)
    assert kept.knob == "publish.delta"


def test_shared_memory_holds_the_object_store_a_staged_publish_and_history_segments(tmp_path: Path) -> None:
    node = NodeResources(cpu_cores=8, available_bytes=1 << 40, gpu_bytes=(), shared_bytes=64 << 20)
    memory = plan_of(spec_of(tmp_path), node, cluster={"object_store_bytes": 1 << 30})
    shortage = shortage_of(memory)
    assert shortage.table.title == "/dev/shm of a node: controller + trainer + engines"
    assert {item.what for item in shortage.table.phases["all phases"]} == {
        "object store",
        "weights in transit",
        "history segments",
    }
    assert shortage.changes[0].key == "cluster.object_store_bytes"


def test_a_table_fits_a_terminal(tmp_path: Path) -> None:
    turns = {"engine": {"sleep_level": 1}, "trainer": {"offload": "all", "optimizer": {"distributed": True}}}
    memory = plan_of(spec_of(tmp_path, **BIG), GPU, **turns)
    assert max(map(len, memory.lines())) <= 100
    assert any(line.startswith("GiB") and line.endswith("wake kv") for line in memory.lines())


def test_critic_and_reference_are_in_the_tables_where_they_are(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    further = FurtherSpecs(critic=spec, reference=spec)

    def tables(place: str) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        trainer = {"offload": "all", "reference": {"place": place, "refresh_every": 5}}
        config = RunConfig.model_validate({**BASE, "trainer": trainer, "engine": {"sleep_level": 1}})
        run = PlannedRun(config=config, spec=spec, placement=plan(config, [GPU]), further=further)
        device, host = (table for table in run_memory(run, [GPU]).tables if table.kind in ("device", "host"))
        return phases(device), phases(host)

    device, host = tables("host")
    head = spec.hidden_size
    output = spec.padded_vocab_size(1) * spec.hidden_size
    whole, critic = device["train"]["trainer parameters"], device["train"]["trainer critic parameters"]
    assert critic == whole - 2 * output + 2 * head
    assert device["train"]["trainer critic optimizer"] == 6 * critic
    assert not any("critic" in what or "reference" in what for what in device["publish"])
    assert "trainer reference parameters" not in device["train"]
    assert host["train"]["reference copies"] >= whole
    on_device, without = tables("device")
    assert on_device["train"]["trainer reference parameters"] == whole
    assert "reference copies" not in without["train"]
    assert without["train"]["pinned offload"] > host["train"]["pinned offload"]
    assert checkpoint_bytes(spec, TrainerConfig(), further) > 1.8 * checkpoint_bytes(spec, TrainerConfig())


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_where_engines_map_memory_of_the_trainer(name: str) -> None:
    environment = {name: "max_split_size_mb:64,expandable_segments:True"}
    (problem,) = allocator_problems("cuda_ipc", environment)
    assert f"{name}=max_split_size_mb:64,expandable_segments:True" in problem
    assert "remove `expandable_segments:True`" in problem and "`publish.transport` to shm" in problem
    assert not allocator_problems("nccl", environment) and not allocator_problems("cuda_ipc", {name: "backend:native"})
    assert not allocator_problems("cuda_ipc", {})


def test_an_object_store_that_cannot_hold_the_longest_responses_causes_a_warning() -> None:
    """512 x 16 responses of 20,480 tokens of 9 bytes; two steps on 16 nodes, and an eighth on each trainer's node."""
    config = load_recipe("dapo-qwen2.5-32b-16n8g", "cluster.object_store_bytes=268435456")
    placement = plan(config, planned_nodes(config, options()))
    (warning,) = store_warnings(config, placement)
    step_mib = 512 * 16 * 20_480 * 9 / 2**20
    assert f"take {step_mib * (2 / 16 + 1 / 8):.0f} MiB of a node's store" in warning
    assert warning.endswith(f"set it to {2 * (256 << 20)}")
    enough = load_recipe("dapo-qwen2.5-32b-16n8g", f"cluster.object_store_bytes={512 << 20}")
    assert store_warnings(enough, placement) == []
    overrides = (f"cluster.object_store_bytes={512 << 20}", "algorithm.max_refill=2", "algorithm.filter=accuracy")
    (warning,) = store_warnings(load_recipe("dapo-qwen2.5-32b-16n8g", *overrides), placement)
    assert f"take {step_mib * (3 * 2 / 16 + 1 / 8):.0f} MiB of a node's store" in warning
