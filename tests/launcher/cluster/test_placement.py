from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster.node import NodeResources
from launcher.cluster.placement import Placement, plan
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.config import ParallelConfig
from megatron_rl.ranks import trainer_ranks

AHEAD = {"overlap": 1, "max_staleness": 1}


def run_config(**parts: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x.jsonl"}]}, **parts}
    )


def device_load(placement: Placement, devices: int) -> list[float]:
    """Sum of fractions per device, with ranks assigned to devices in order."""
    load = [0.0] * devices
    for slot in placement.trainers:
        load[slot.rank % devices] += slot.num_gpus
    ranks = [slot.num_gpus for slot in placement.engines for _ in range(slot.num_ranks)]
    for number, share in enumerate(ranks):
        load[number % devices] += share
    return load


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_position_of_the_grid_has_one_rank_with_tensor_rank_varying_fastest(
    tensor: int, pipeline: int, data: int
) -> None:
    slots = trainer_ranks(ParallelConfig(tensor=tensor, pipeline=pipeline, data=data), cpu_threads=1)
    places = [(slot.pipeline_rank, slot.data_rank, slot.tensor_rank) for slot in slots]
    assert places == [(p, d, t) for p in range(pipeline) for d in range(data) for t in range(tensor)]
    assert [slot.rank for slot in slots] == list(range(tensor * pipeline * data))


def test_a_cpu_run_gets_threads_and_no_device(node: NodeResources) -> None:
    placement = plan(run_config(trainer={"parallel": {"tensor": 2}}, engine={"num_engines": 2}), [node])
    assert [slot.engine_id for slot in placement.engines] == [0, 1]
    assert {slot.num_gpus for slot in (*placement.engines, *placement.trainers)} == {0}
    assert placement.notes == ()


def test_more_threads_in_one_process_than_cores_are_refused(node: NodeResources) -> None:
    with pytest.raises(ConfigError, match=r"`engine.cpu_cores` = 3 .* 2 cores"):
        plan(run_config(engine={"cpu_cores": 3}), [node])


def test_more_processes_than_cores_are_allowed_with_a_note(node: NodeResources) -> None:
    placement = plan(run_config(trainer={"parallel": {"tensor": 2, "pipeline": 2}}), [node])
    assert "trainer 4 threads on 2 cores" in placement.lines()[-1]


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([1, 2]))
def test_no_device_is_assigned_more_than_once(devices: int, num_engines: int, tensor: int) -> None:
    node = NodeResources(cpu_cores=16, available_bytes=1 << 36, gpu_bytes=(80 << 30,) * devices)
    config = run_config(
        engine={"num_engines": num_engines, "tensor_parallel": min(tensor, devices)},
        trainer={"parallel": {"data": devices}},
    )
    placement = plan(config, [node])
    assert max(device_load(placement, devices)) <= 1.0 + 1e-9
    assert all(slot.num_gpus > 0 for slot in (*placement.engines, *placement.trainers))


def test_a_trainer_larger_than_the_node_is_refused_naming_its_grid(node: NodeResources) -> None:
    with pytest.raises(ConfigError, match=r"needs 4 devices \(tensor 2 x pipeline 1 x data 2\), but the node has 2"):
        plan(run_config(trainer={"parallel": {"tensor": 2, "data": 2}}), [replace(node, gpu_bytes=(1 << 36,) * 2)])


def test_the_history_is_placed_if_engines_draft_and_uses_no_logical_cpu(node: NodeResources) -> None:
    drafting = plan(run_config(history={"num_shards": 2}), [node])
    assert "history: 2 shard(s) and 1 reader" in drafting.lines()
    stock = plan(run_config(history={"drafts": False}), [node])
    assert not any(line.startswith("history") for line in stock.lines())
    assert drafting.num_actors == stock.num_actors


@pytest.mark.parametrize(
    ("publish", "address", "devices", "trainers", "chosen"),
    [
        ({}, "local", 0, 1, "shm"),
        ({}, "10.0.0.1:6379", 0, 1, "shm"),
        ({"delta": True}, "local", 0, 1, "shm"),  # on one machine a delta would be slower
        ({"delta": True, "transport": "gloo"}, "local", 0, 1, "gloo"),
        ({"transport": "gloo"}, "local", 0, 1, "gloo"),
        ({"transport": "shm"}, "10.0.0.1:6379", 0, 1, "shm"),
        ({}, "local", 2, 2, "cuda_ipc"),
        ({}, "local", 2, 1, "shm"),  # an engine is on a device without a trainer rank
        ({"delta": True}, "local", 2, 2, "cuda_ipc"),
        ({}, "10.0.0.1:6379", 2, 2, "cuda_ipc"),
        ({"transport": "nccl"}, "local", 4, 2, "nccl"),
    ],
)
def test_the_fastest_transport_that_reaches_every_engine_is_chosen(
    node: NodeResources, publish: dict[str, object], address: str, devices: int, trainers: int, chosen: str
) -> None:
    config = run_config(
        publish=publish,
        cluster={"address": address},
        engine={"num_engines": 2},
        trainer={"parallel": {"data": trainers}},
        algorithm={"prompts_per_step": 4, "group_size": 4},
    )
    assert plan(config, [replace(node, gpu_bytes=(1 << 36,) * devices)]).transport == chosen


def test_a_delta_that_would_be_slower_is_declined_in_one_line(node: NodeResources) -> None:
    declined = plan(run_config(publish={"delta": True}), [node])
    (note,) = declined.notes
    assert declined.declines_delta and note.startswith("`publish.delta` = true is not used: on one machine")
    asked = plan(run_config(publish={"delta": True, "transport": "gloo"}), [node])
    assert not asked.declines_delta and asked.notes == ()


def test_notes_tell_of_cores_shared_at_once_and_of_idle_engines(node: NodeResources) -> None:
    apart = {"placement": {"mode": "disaggregated"}, "engine": {"cpu_cores": 2}}
    (crowded,) = plan(run_config(**apart, planner=AHEAD), [node]).notes
    assert crowded == "trainer and engines 3 threads on 2 cores: expect waiting"
    (idle,) = plan(run_config(**apart), [node]).notes
    assert "engines idle while the trainer works" in idle and "planner.overlap" in idle
    assert plan(run_config(engine={"cpu_cores": 2}, planner=AHEAD), [node]).notes == ()


def test_placement_names_devices_and_whether_they_are_shared(node: NodeResources) -> None:
    four = replace(node, gpu_bytes=(1 << 36,) * 4)
    parts = {"engine": {"num_engines": 1, "tensor_parallel": 2}, "trainer": {"parallel": {"tensor": 2}}}
    shared = plan(run_config(**parts), [four])
    assert [slot.devices for slot in shared.trainers] == [(0,), (1,)]
    assert [slot.devices for slot in shared.engines] == [(0, 1)]
    assert shared.notes == ()
    (note,) = plan(run_config(**parts, publish={"transport": "shm"}), [four]).notes
    assert note == "weights go through the host (shm): publish.transport is shm"
    (note,) = plan(run_config(**parts | {"trainer": {}}), [four]).notes
    assert note == "weights go through the host (shm): an engine is on a device without a trainer rank"
    apart = plan(run_config(**parts, placement={"mode": "disaggregated"}, planner=AHEAD), [four])
    assert (apart.transport, apart.notes) == ("nccl", ())
    assert [slot.devices for slot in apart.trainers] == [(0,), (1,)]
    assert [slot.devices for slot in apart.engines] == [(2, 3)]
    assert {slot.num_gpus for slot in (*apart.engines, *apart.trainers)} == {1.0}


def test_a_transport_that_the_devices_do_not_support_is_refused(node: NodeResources) -> None:
    two = replace(node, gpu_bytes=(1 << 36,) * 2)
    with pytest.raises(
        ConfigError, match=r"disaggregated needs devices for 1 trainer rank\(s\) and 2 engine rank\(s\)"
    ):
        plan(run_config(placement={"mode": "disaggregated"}, engine={"num_engines": 2}), [two])
    for transport in ("nccl", "cuda_ipc"):
        with pytest.raises(ConfigError, match=f"{transport} moves weights between GPUs"):
            plan(run_config(publish={"transport": transport}), [node])
    alone = run_config(publish={"transport": "cuda_ipc"}, engine={"num_engines": 2})
    with pytest.raises(ConfigError, match=r"device\(s\) \[1\] have no trainer rank"):
        plan(alone, [two])
