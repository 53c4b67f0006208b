"""Memory of a publish through shared memory, against the regions that trainer ranks would reserve."""

from collections import Counter

import pytest

from launcher.estimate.loads import node_loads
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.publish_memory import host_publish_items
from launcher.estimate.run_tables import run_tables
from megatron_rl.weights.reshard_plan import plan_reshard
from rollout.transports.node_routes import shared_buckets
from rollout.transports.shm_files import bucket_offsets
from rollout.weights.format import WeightFormat
from tests.launcher.estimate.runs import SPEC, nodes_of, planned


def over_nodes(tensor: int, num_engines: int, *, nodes: int = 2) -> PlannedRun:
    """A run on nodes of 8 GPUs whose weights travel through shared memory."""
    return planned(
        gpus=8,
        nodes=nodes,
        trainer={"parallel": {"data": 8 * nodes}, "optimizer": {"distributed": True}},
        engine={"num_engines": num_engines, "tensor_parallel": tensor},
        publish={"transport": "shm"},
    )


def in_transit(run: PlannedRun) -> dict[str, int]:
    """Bytes by node."""
    return {
        name: sum(item.num_bytes for item in host_publish_items(run, load) if item.what == "weights in transit")
        for load, names in node_loads(run.placement).items()
        for name in names
    }


def test_over_nodes_every_engine_on_devices_of_its_own_has_a_copy() -> None:
    """The regions are those that `ColocatedSender` reserves for buckets that every engine rank requires."""
    run = over_nodes(1, 16)
    assert run.placement.spans_nodes and run.placement.transport == "shm"
    plan = plan_reshard(
        SPEC,
        run.config.trainer.parallel,
        format=WeightFormat.of(run.config.engine),
        bucket_bytes=run.config.publish.bucket_bytes,
        uses_te_layer_names=True,
    )
    regions = Counter[str]()
    for trainer in run.placement.trainers:
        hosted = {n for home in run.placement.homes for n, host in enumerate(home) if host == trainer.rank}
        regions[trainer.node] += bucket_offsets(shared_buckets(plan.buckets, sorted(hosted)))[1]
    found = in_transit(run)
    assert found == {node: pytest.approx(size, rel=0.001) for node, size in regions.items()}
    assert set(found.values()) == {8 * run.publish_bytes}


@pytest.mark.parametrize(
    ("tensor", "num_engines", "copies"),
    [
        (2, 8, 4),
        (8, 2, 1),
        # two engines on each device share the region of its trainer rank
        (1, 32, 8),
        (8, 4, 1),
    ],
)
def test_engines_share_a_copy_where_they_share_devices(tensor: int, num_engines: int, copies: int) -> None:
    run = over_nodes(tensor, num_engines)
    assert set(in_transit(run).values()) == {copies * run.publish_bytes}


def test_on_one_node_all_engines_share_one_copy() -> None:
    run = over_nodes(1, 8, nodes=1)
    assert set(in_transit(run).values()) == {run.publish_bytes}


def test_host_memory_and_shared_memory_both_hold_the_copies() -> None:
    run = over_nodes(1, 16)
    tables = {table.kind: table for table in run_tables(run, nodes_of(8, 2))}
    for kind in ("host", "/dev/shm"):
        sizes = {item.what: item.num_bytes for item in tables[kind].phases["publish"]}
        assert sizes["weights in transit"] == 8 * run.publish_bytes
