import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.drafting.traces import generate
from history.lengths.reuse import RUN_TOKENS, rank_correlation, reusable_share
from history.types import PastResponse

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=14), max_size=4)


def past(*texts: list[int]) -> list[PastResponse]:
    return [PastResponse(token_ids=np.array(text, dtype=np.int32), step=0, sample=i) for i, text in enumerate(texts)]


def naive_share(before: list[list[int]], now: list[list[int]]) -> float:
    known = {tuple(text[i : i + RUN_TOKENS]) for text in before for i in range(len(text) - RUN_TOKENS + 1)}
    reused = 0
    for text in now:
        runs = [i for i in range(len(text) - RUN_TOKENS + 1) if tuple(text[i : i + RUN_TOKENS]) in known]
        reused += len({i + k for i in runs for k in range(RUN_TOKENS)})
    return reused / max(sum(map(len, now)), 1)


@given(TEXTS, TEXTS)
def test_reusable_share_equals_the_naive_one(before: list[list[int]], now: list[list[int]]) -> None:
    assert reusable_share(past(*before), past(*now)) == naive_share(before, now)


def test_tokens_count_as_reused_only_inside_earlier_runs() -> None:
    before = past([1, 2, 3, 4, 5], [7, 8])
    assert reusable_share(before, past([9, 2, 3, 4, 5, 9])) == pytest.approx(4 / 6)
    assert reusable_share(before, past([2, 3, 4, 9])) == 0.0
    # a run may not reach from one response into the next
    assert reusable_share(before, past([4, 5, 7, 8])) == 0.0


def test_reuse_is_zero_before_the_first_visit_and_without_tokens() -> None:
    assert reusable_share([], past([1, 2, 3, 4])) == 0.0
    assert reusable_share(past([1, 2, 3, 4]), past([])) == 0.0


def test_the_reuse_of_generated_traces_is_recovered() -> None:
    traces = generate(reuse=0.87, num_tokens=1000, num_prompts=1).traces
    visits = [past(*(trace.response_ids.tolist() for trace in traces if trace.step == step)) for step in (0, 1)]
    assert 0.75 < reusable_share(*visits) < 0.95


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_rank_correlation_equals_the_naive_one(pairs: list[tuple[int, int]]) -> None:
    columns = [list(column) for column in zip(*pairs, strict=True)]
    # the mean rank of a value: those below it, and half of its equals
    ranks = [[sum(b < a for b in column) + (column.count(a) + 1) / 2 for a in column] for column in columns]
    deviations = [np.array(rank) - np.mean(rank) for rank in ranks]
    spread = math.sqrt(float((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum()))
    found = rank_correlation(*columns)
    if spread == 0:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(float((deviations[0] * deviations[1]).sum()) / spread)


def test_rank_correlation_depends_on_order_alone() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 300, 4000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert math.isnan(rank_correlation([1], [1]))
