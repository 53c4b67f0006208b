import numpy as np
import pytest

from benchmarks.drafting.bound import bound_row, count_drafts
from tests.support.traces import trace


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_repeated_text_is_drafted_whole_but_for_its_last_token() -> None:
    old, new = trace(range(1, 41), step=0), trace(range(1, 41), step=1)
    row = bound_row("case", 1, [old], [new], max_draft_tokens=16)
    # 17 + 17 + 6, the last of which is never drafted
    assert row["tokens_per_forward"] == pytest.approx(40 / 3, abs=1e-4)
    assert row["without_chance"] == row["tokens_per_forward"]


def test_matches_by_chance_are_counted_separately() -> None:
    row = bound_row("case", 1, [trace([7, 8], step=0)], [trace([1, 7, 8, 9, 7, 8, 5], step=1)])
    # 1 | 7 8 9 | 7 8 5: pieces of two tokens
    assert (row["tokens_per_forward"], row["without_chance"]) == (pytest.approx(7 / 3, abs=1e-4), 1.0)


def test_tokens_that_are_not_emitted_yet_are_not_drafted() -> None:
    alike = ids(1, 2, 3, 4, 5, 6)
    assert count_drafts([], [alike, alike], 4).tolist() == [12, 0, 0, 0, 0], "both say the same at the same time"
    behind = ids(9, 1, 2, 3, 4, 5, 6)
    counts = count_drafts([], [alike, behind], 4)
    assert counts[0] > 6, "who is ahead has nothing to follow"
    assert counts[1:].sum() > 0, "who is behind has what the other said before this forward"


def test_a_position_counts_only_if_its_context_matches() -> None:
    past, response = [ids(5, 6, 1, 2, 3, 4)], ids(6, 1, 2, 3, 9)
    # 6 1 2 3 9, known beforehand; 6 | 1 2 3 9, behind the 6; 6 | 1 | 2 3 9, behind 6 and 1
    for context, expected in ((0, [0, 0, 0, 0, 1]), (1, [1, 0, 0, 1, 0]), (2, [2, 0, 1, 0, 0])):
        assert count_drafts(past, [response], 4, context=context).tolist() == expected, context
    assert count_drafts(past, [ids(5, 6, 1, 2, 3, 4)], 8, context=2)[5] == 1, "beginnings lead to beginnings"


def test_a_position_near_the_last_one_needs_no_context() -> None:
    past = [ids(*range(10, 40))]
    copied = ids(*range(10, 18), 99, *range(19, 27), 5)  # a token is replaced
    assert count_drafts(past, [copied], 16, context=3).tolist()[8] == 2
    far = ids(*range(10, 18), 99, *range(31, 39), 5)
    assert count_drafts(past, [far], 16, context=3).tolist()[8] == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_equals_a_naive_search(seed: int) -> None:
    generator = np.random.default_rng(seed)
    past, responses = ([generator.integers(0, 4, size).astype(np.int32) for size in (30, 17)] for _ in range(2))
    expected = np.zeros(6, dtype=np.int64)
    known = [0, 0]
    while any(known[row] < len(response) for row, response in enumerate(responses)):
        texts = [*past, *(response[: known[row]] for row, response in enumerate(responses))]
        pieces = {
            tuple(text[i : i + n].tolist()) for text in texts for n in range(1, 6) for i in range(len(text) - n + 1)
        }
        for row, response in enumerate(responses):
            rest = response[known[row] :].tolist()
            if rest:
                best = max(n for n in range(min(6, len(rest))) if n == 0 or tuple(rest[:n]) in pieces)
                expected[best] += 1
                known[row] += best + 1
    assert count_drafts(past, responses, 5).tolist() == expected.tolist()
