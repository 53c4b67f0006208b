from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import RunConfig
from launcher.environment import NodeResources
from launcher.errors import ConfigError
from launcher.placement import Placement, plan
from megatron_rl.config import ParallelConfig
from megatron_rl.slots import trainer_slots


def run_config(**parts: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x.jsonl"}]}, **parts}
    )


def device_load(placement: Placement, devices: int) -> list[float]:
    """Sum of fractions per device, with ranks laid over devices in order."""
    load = [0.0] * devices
    for slot in placement.trainers:
        load[slot.rank % devices] += slot.num_gpus
    ranks = [slot.num_gpus for slot in placement.engines for _ in range(slot.num_ranks)]
    for number, share in enumerate(ranks):
        load[number % devices] += share
    return load


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_place_of_the_grid_has_exactly_one_rank_tensor_fastest(tensor: int, pipeline: int, data: int) -> None:
    slots = trainer_slots(ParallelConfig(tensor=tensor, pipeline=pipeline, data=data), cpu_threads=1)
    places = [(slot.pipeline_rank, slot.data_rank, slot.tensor_rank) for slot in slots]
    assert places == [(p, d, t) for p in range(pipeline) for d in range(data) for t in range(tensor)]
    assert [slot.rank for slot in slots] == list(range(tensor * pipeline * data))


def test_a_cpu_run_takes_threads_and_no_device(node: NodeResources) -> None:
    placement = plan(run_config(trainer={"parallel": {"tensor": 2}}, engine={"num_engines": 2}), node)
    assert [slot.engine_id for slot in placement.engines] == [0, 1]
    assert {slot.num_gpus for slot in (*placement.engines, *placement.trainers)} == {0}
    assert placement.crowded == ""


def test_more_threads_in_one_process_than_cores_are_refused(node: NodeResources) -> None:
    with pytest.raises(ConfigError, match=r"`engine.cpu_cores` = 3 .* 2 cores"):
        plan(run_config(engine={"cpu_cores": 3}), node)


def test_more_processes_than_cores_are_allowed_and_said(node: NodeResources) -> None:
    placement = plan(run_config(trainer={"parallel": {"tensor": 2, "pipeline": 2}}), node)
    assert "trainer 4 threads on 2 cores" in placement.lines()[-1]


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([1, 2]))
def test_no_device_is_promised_more_than_once(devices: int, num_engines: int, tensor: int) -> None:
    node = NodeResources(cpu_cores=16, available_bytes=1 << 36, gpu_bytes=(80 << 30,) * devices)
    config = run_config(
        engine={"num_engines": num_engines, "tensor_parallel": min(tensor, devices)},
        trainer={"parallel": {"data": devices}},
    )
    placement = plan(config, node)
    assert max(device_load(placement, devices)) <= 1.0 + 1e-9
    assert all(slot.num_gpus > 0 for slot in (*placement.engines, *placement.trainers))


def test_a_trainer_larger_than_the_node_is_refused_naming_its_grid(node: NodeResources) -> None:
    with pytest.raises(ConfigError, match=r"needs 4 devices \(tensor 2 x pipeline 1 x data 2\), but the node has 2"):
        plan(run_config(trainer={"parallel": {"tensor": 2, "data": 2}}), replace(node, gpu_bytes=(1 << 36,) * 2))


def test_the_history_is_named_where_engines_draft_and_takes_no_logical_cpu(node: NodeResources) -> None:
    drafting = plan(run_config(history={"num_shards": 2}), node)
    assert "history: 2 shard(s) and 1 reader" in drafting.lines()
    stock = plan(run_config(history={"drafts": False}), node)
    assert not any(line.startswith("history") for line in stock.lines())
    assert drafting.num_actors == stock.num_actors
