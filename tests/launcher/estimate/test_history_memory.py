"""Memory of the history on the nodes of a run, against closed forms."""

from launcher.estimate.host_memory import HISTORY_PROCESS_BYTES, SEGMENT_FILE_BYTES, SEGMENT_TOKEN_BYTES, history_items
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
