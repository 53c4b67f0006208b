"""Bounds on the bytes that cross between nodes."""

import pytest

from benchmarks.harness.record import Row
from benchmarks.publish.over_nodes import goals

CASES = [(mode, nodes) for nodes in (2, 4) for mode in ("colocated", "disaggregated")]


def rows(*, copies: float) -> list[Row]:
    """Every case, with a number of copies of each bucket to each node that needs one; headers are a thousandth."""
    found: list[Row] = []
    for mode, nodes in CASES:
        # colocated, each bucket begins on one of the nodes with takers; else the trainer's node has no takers
        takers = nodes if mode == "colocated" else nodes - 1
        crossing = copies * (nodes - 1) * 1.001
        found.append({"mode": mode, "nodes": nodes, "nodes_with_takers": takers, "ratio": crossing / takers})
    return found


def test_one_copy_for_each_node_that_lacks_it_meets_every_goal() -> None:
    found = goals(rows(copies=1))
    assert all(goal.met for goal in found)
    assert [goal.bound for goal in found] == pytest.approx([1.05 / 2, 1.05, 1.05 * 3 / 4, 1.05])


@pytest.mark.parametrize("copies", [1.1, 2.0])
def test_more_copies_miss_every_goal(copies: float) -> None:
    assert [goal.met for goal in goals(rows(copies=copies))] == [False] * len(CASES)
