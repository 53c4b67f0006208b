"""Memory of the history and of the book of lengths on the nodes of a run, against closed forms."""

import tracemalloc

from history.lengths.book import LengthBook
from launcher.estimate.host_memory import (
    CONTROLLER_BYTES,
    HISTORY_PROCESS_BYTES,
    SEGMENT_FILE_BYTES,
    SEGMENT_TOKEN_BYTES,
    history_items,
    host_table,
)
from launcher.estimate.loads import node_loads
from tests.launcher.estimate.runs import planned


def test_a_node_holds_the_segments_of_its_engines_and_its_shard() -> None:
    run = planned(
        gpus=8,
        nodes=2,
        trainer={"parallel": {"data": 16}},
        engine={"num_engines": 16},
        algorithm={"prompts_per_step": 4, "group_size": 8},
        sampling={"max_response_tokens": 100},
        history={"budget_bytes": 1 << 10},
    )
    (first, second) = (
        {item.what: item.num_bytes for item in history_items(run, load)} for load in node_loads(run.placement)
    )
    assert first == second
    # two steps of tokens, half of them on each node
    assert first["history segments"] == 2 * 4 * (8 * 100 * SEGMENT_TOKEN_BYTES + SEGMENT_FILE_BYTES) // 2
    assert first["history"] == 1 << 9
    assert first["history processes"] == 2 * HISTORY_PROCESS_BYTES


def test_the_first_node_holds_the_lengths_of_all_groups_of_the_run() -> None:
    """The book of 10 steps of 40 groups, 8 responses each, is measured; the constants of its bound are tested there."""
    run = planned(
        gpus=8,
        nodes=2,
        trainer={"parallel": {"data": 16}},
        engine={"num_engines": 16},
        algorithm={"prompts_per_step": 40, "group_size": 8},
    )
    first, second = (
        {item.what: item.num_bytes for item in host_table(run, load, count=1, available_bytes=1 << 40).phases["train"]}
        for load in node_loads(run.placement)
    )
    tracemalloc.start()
    try:
        book = LengthBook()
        for number in range(10 * 40):
            book.observe((1 << 62) + number, number // 40, range(1, 9))
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert measured <= first["lengths of responses"] <= 4 * measured
    assert first["controller"] == CONTROLLER_BYTES
    assert "controller" not in second and "lengths of responses" not in second
