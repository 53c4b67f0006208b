"""`balance`: the invariants of `megatron_rl.batching.balance`, checked by one helper on every placement made here."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batching.balance import balance
from megatron_rl.batching.cost_model import CostModel
from tests.support.deadline import DEADLINE_S

COSTS = CostModel(parity_tokens=30_720)


def responses(count: int, *, seed: int = 0) -> list[int]:
    """Response lengths with a long tail."""
    generator = np.random.default_rng(seed)
    return np.minimum(generator.lognormal(np.log(4000), 0.9, size=count), 32_768).astype(int).tolist()


def best_fit_needs(lengths: list[int], max_tokens: int) -> int:
    """Number of micro batches by naive best-fit decreasing."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        rooms.remove(min(fitting)) if fitting else None
        rooms.append((min(fitting) if fitting else max(max_tokens, length)) - length)
    return len(rooms)


def placed(lengths, *, num_ranks, max_tokens, costs=COSTS):
    """`balance`, with its invariants checked."""
    ranks = balance(lengths, num_ranks=num_ranks, max_tokens=max_tokens, costs=costs)
    micros = [micro for rank in ranks for micro in rank]
    assert sorted(i for micro in micros for i in micro) == list(range(len(lengths)))
    assert len(ranks) == num_ranks
    (count,) = {len(rank) for rank in ranks}
    assert (count == 0) == (not lengths)
    for micro in micros:
        assert sum(lengths[i] for i in micro) <= max_tokens or len(micro) == 1
    fewest = -(-best_fit_needs(lengths, max_tokens) // num_ranks)
    assert count == fewest or (count > fewest and costs.pipeline > 1)
    assert balance(tuple(lengths), num_ranks=num_ranks, max_tokens=max_tokens, costs=costs) == ranks
    return ranks


def rank_times(ranks, lengths, costs=COSTS):
    return [costs.rank_time([[lengths[i] for i in micro] for micro in rank]) for rank in ranks]


def micro_costs(ranks, lengths, costs=COSTS):
    return np.array([[costs.rank_time([[lengths[i] for i in micro]]) for micro in rank] for rank in ranks])


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 120), max_size=60),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 300),
    parity_tokens=st.sampled_from([1, 50, 10**6]),
    overhead_tokens=st.sampled_from([0, 5, 100]),
    pipeline=st.integers(1, 4),
)
def test_invariants_hold_for_any_lengths(lengths, num_ranks, max_tokens, parity_tokens, overhead_tokens, pipeline):
    costs = CostModel(parity_tokens=parity_tokens, overhead_tokens=overhead_tokens, pipeline=pipeline)
    placed(lengths, num_ranks=num_ranks, max_tokens=max_tokens, costs=costs)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=300), max_tokens=st.sampled_from([2000, 2**20 + 7]))
def test_long_lists_and_large_micro_batches_keep_the_invariants(lengths, max_tokens):
    placed(lengths, num_ranks=3, max_tokens=max_tokens)


def test_no_samples_need_no_micro_batches():
    assert placed([], num_ranks=3, max_tokens=10) == [[], [], []]


def test_a_sample_longer_than_a_micro_batch_is_alone():
    ranks = placed([100, 4, 4], num_ranks=1, max_tokens=10)
    assert sorted(map(sorted, ranks[0])) == [[0], [1, 2]]


def test_fewer_samples_than_ranks_leave_empty_micro_batches():
    ranks = placed([7, 9], num_ranks=4, max_tokens=100)
    assert sorted(len(micro) for (micro,) in ranks) == [0, 0, 1, 1]


@pytest.mark.parametrize("wrong", [{"num_ranks": 0}, {"max_tokens": 0}, {"lengths": [3, -1]}])
def test_invalid_sizes_are_refused(wrong):
    arguments = {"lengths": [3], "num_ranks": 1, "max_tokens": 1} | wrong
    with pytest.raises(ValueError, match=r"must"):
        balance(**arguments, costs=COSTS)


def test_another_process_computes_the_same_placement():
    lengths = responses(400)
    code = (
        "from megatron_rl.batching.balance import balance; from megatron_rl.batching.cost_model import CostModel; "
        f"print(balance({lengths}, num_ranks=8, max_tokens=33_792, costs=CostModel(parity_tokens=30_720)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == str(balance(lengths, num_ranks=8, max_tokens=33_792, costs=COSTS))


@pytest.mark.parametrize(
    ("count", "num_ranks", "max_tokens"), [(512, 8, 33_792), (2048, 64, 33_792), (2048, 16, 10**9)]
)
def test_ranks_take_equally_long(count, num_ranks, max_tokens):
    lengths = responses(count)
    times = rank_times(placed(lengths, num_ranks=num_ranks, max_tokens=max_tokens), lengths)
    assert max(times) / np.mean(times) - 1 < 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_few_samples_a_rank_are_balanced_up_to_the_longest_sample(seed):
    lengths = responses(512, seed=seed)
    costs = CostModel(parity_tokens=30_720, overhead_tokens=0)
    times = rank_times(placed(lengths, num_ranks=64, max_tokens=10**9, costs=costs), lengths, costs)
    bound = max(np.mean(times), costs.rank_time([[max(lengths)]]))
    assert max(times) <= 1.001 * bound


def test_micro_batches_are_nearly_full():
    lengths = [length for length in responses(2000) if length > 100]
    most = sum(lengths) / 33_792
    ranks = placed(lengths, num_ranks=1, max_tokens=33_792)
    assert len(ranks[0]) <= most + 2


def test_a_pipeline_gets_more_and_smaller_micro_batches_if_that_is_faster():
    lengths = [1000] * 64
    flat = placed(lengths, num_ranks=2, max_tokens=32_000)
    deep = CostModel(parity_tokens=30_720, pipeline=4)
    staged = placed(lengths, num_ranks=2, max_tokens=32_000, costs=deep)
    assert len(flat[0]) == 1
    # by hand: 32 samples a rank, 3 more times the costliest, 256 tokens of overhead: 16 of two samples each are best
    assert len(staged[0]) == 16
    assert max(rank_times(staged, lengths, deep)) < 0.6 * max(rank_times(flat, lengths, deep))


def test_a_pipeline_gets_few_micro_batches_if_their_overhead_is_large():
    deep = CostModel(parity_tokens=30_720, pipeline=4, overhead_tokens=10**6)
    assert len(placed([1000] * 64, num_ranks=2, max_tokens=32_000, costs=deep)[0]) == 1


def test_a_pipeline_is_no_slower_than_with_any_other_number_of_equal_samples():
    lengths = [500] * 120
    costs = CostModel(parity_tokens=10_000, pipeline=3, overhead_tokens=200)
    chosen = max(rank_times(placed(lengths, num_ranks=2, max_tokens=20_000, costs=costs), lengths, costs))
    for size in range(1, 41):
        share = [lengths[start : start + size] for start in range(0, 60, size)]
        assert chosen <= costs.rank_time(share) * 1.0001


def test_small_micro_batches_are_at_both_ends_and_equal_positions_have_similar_sizes():
    lengths = responses(2048)
    found = micro_costs(placed(lengths, num_ranks=16, max_tokens=33_792), lengths)
    middle = found.shape[1] // 2
    assert (np.diff(found[:, : middle + 1]) >= 0).all() and (np.diff(found[:, middle + 1 :]) <= 0).all()
    assert found.max(axis=0).sum() < 1.1 * found.sum(axis=1).mean()
