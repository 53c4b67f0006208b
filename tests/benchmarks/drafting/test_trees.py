from pathlib import Path

from benchmarks.drafting.traces import generate
from benchmarks.drafting.trees import decode, lead, main, num_nodes


def test_a_tree_has_each_common_prefix_once() -> None:
    assert num_nodes([[1, 2, 3], [1, 2, 4, 5], [6], []]) == 6
    assert lead([1, 2, 3], [1, 2, 4]) == 2
    assert lead([1, 2, 3], [1]) == 1


def test_a_tree_of_all_candidates_emits_more_than_its_chain_and_verifies_more() -> None:
    traces = generate(reuse=0.87, num_tokens=300, num_prompts=2).traces
    tree = decode(traces, k=16, threshold=0.1, tree=True)
    chain = decode(traces, k=16, threshold=0.1, tree=False)
    assert tree[0] > chain[0] > 2
    assert tree[1] > chain[1]


def test_a_quick_run_writes_a_record(tmp_path: Path) -> None:
    assert main(["--json", str(tmp_path / "out.json"), "--quick"]) == 0
    assert (tmp_path / "out.json").exists()
