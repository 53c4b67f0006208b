"""Bounds of packings against brute force, the peer's driver with a stand-in, and rows and goals of the record."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing import __main__ as packing
from benchmarks.packing import verl
from benchmarks.packing.bounds import fewest_micro_batches, least_rank_cost, one_forward_one_backward
from megatron_rl.batching.cost_model import CostModel

STAND_IN = """
import torch
from torch import distributed
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name


def ceildiv(a, b):
    return -(a // -b)


def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    return [list(range(part, len(seqlen_list), k_partitions)) for part in range(k_partitions)]
"""


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=6), max_tokens=st.integers(10, 14))
def test_no_packing_has_fewer_micro_batches_than_the_bound(lengths, max_tokens):
    packings = product(range(len(lengths)), repeat=len(lengths))
    fits = [len(set(packed)) for packed in packings if max(np.bincount(packed, weights=lengths)) <= max_tokens]
    bound = fewest_micro_batches(lengths, num_ranks=1, max_tokens=max_tokens)
    assert -(-sum(lengths) // max_tokens) <= bound <= min(fits)
    assert fewest_micro_batches(lengths, num_ranks=2, max_tokens=max_tokens) == -(-bound // 2)


def test_samples_above_half_of_a_micro_batch_never_share_one():
    assert fewest_micro_batches([6, 6, 6, 6, 4, 4], num_ranks=1, max_tokens=10) == 4
    assert fewest_micro_batches([6, 6, 6, 6, 5, 5], num_ranks=1, max_tokens=10) == 5


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=7), num_ranks=st.integers(1, 3))
def test_no_placement_has_a_cheaper_slowest_rank_than_the_bound(costs, num_ranks):
    placements = product(range(num_ranks), repeat=len(costs))
    best = min(max(np.bincount(placed, weights=costs, minlength=num_ranks)) for placed in placements)
    assert least_rank_cost(np.array(costs, dtype=np.float64), num_ranks) <= best + 1e-9


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_schedule_of_equal_micro_batches_adds_stages_minus_one(stages, count):
    assert one_forward_one_backward([6.0] * count, stages) == pytest.approx(6 * (count + stages - 1))


@given(costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=8), stages=st.integers(1, 4))
def test_a_schedule_takes_no_less_than_its_busiest_stage(costs, stages):
    duration = one_forward_one_backward(costs, stages)
    assert duration >= sum(costs) + (stages - 1) * min(costs) - 1e-9


def test_the_peer_is_absent_before_its_download(tmp_path):
    assert verl.load(tmp_path) is None


def test_the_peer_adds_micro_batches_until_each_is_within_the_bound(tmp_path):
    (tmp_path / "seqlen_balancing.py").write_text(STAND_IN)
    peer = verl.load(tmp_path)
    assert peer is not None
    # one rank has [9, 9, 1, 1], the other [1, 1, 1, 1]; its tokens ask for three parts, of which one holds 9 + 1
    planned = verl.plan_micro_batches(peer, [9, 1, 9, 1, 1, 1, 1, 1], num_ranks=2, max_tokens=9)
    assert [len(rank) for rank in planned.ranks] == [4, 4]
    assert sorted(i for rank in planned.ranks for one in rank for i in one) == list(range(8))
    assert planned.total_seconds >= planned.seconds > 0


@pytest.mark.slow
def test_rows_and_goals_are_those_of_the_record(tmp_path):
    (tmp_path / "seqlen_balancing.py").write_text(STAND_IN)
    peer = verl.load(tmp_path)
    deep = CostModel(parity_tokens=24_576, pipeline=2)
    found = [
        packing.Case(kind="ranks", samples=512, ranks=64, max_tokens=10**9),
        packing.Case(kind="micro_batches", samples=64, ranks=2, max_tokens=packing.MAX_TOKENS),
        packing.Case(kind="pipeline", samples=64, ranks=2, max_tokens=packing.LOOSE_TOKENS, costs=deep),
    ]
    rows = [row for case in found for row in packing.measure(case, peer, rounds=1)]
    assert [(row["kind"], row["method"]) for row in rows] == [
        ("ranks", "ours"),
        ("ranks", "verl"),
        ("ranks", "verl, any number on a rank"),
        ("micro_batches", "ours"),
        ("micro_batches", "verl"),
        ("pipeline", "ours"),
        ("pipeline", "ours without knowing of the pipeline"),
        ("pipeline", "verl"),
    ]
    assert all(goal.met for goal in packing.goals(rows)) and len(packing.goals(rows)) == 2
