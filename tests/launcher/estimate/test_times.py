"""Estimates of time against closed forms and a walk from token to token."""

import numpy as np
import pytest

from launcher.estimate.hardware import GPUS
from launcher.estimate.lengths import stated_lengths
from launcher.estimate.publish_time import publish_estimate
from launcher.estimate.rollout_time import forward_s, rollout_estimate, sampling_s
from launcher.estimate.step_time import step_estimate
from launcher.estimate.train_time import train_estimate
from megatron_rl.memory import num_parameters
from tests.launcher.estimate.runs import KV_BYTES, LINEAR, OUTPUT, SPEC, given, planned

H100_BYTES_S, H100_FLOPS, H100_8_BIT = 3.35e12, 989.4e12, 1978.9e12


def test_one_request_reads_the_weights_and_its_keys_and_values() -> None:
    seconds, bound = forward_s(planned(), given(), 1, context=1000)
    weights = 2 * (num_parameters(SPEC) - OUTPUT)  # the embedding is not read
    assert (seconds, bound) == (pytest.approx((weights + 1000 * KV_BYTES) / H100_BYTES_S), "memory")
    half, _ = forward_s(planned(), given(bandwidth_share=0.5), 1, context=1000)
    assert half == pytest.approx(2 * seconds)


def test_many_requests_are_bound_by_products() -> None:
    requests, context = 4096, 10
    seconds, bound = forward_s(planned(), given(), requests, context)
    flops = requests * (2 * (LINEAR + OUTPUT) + 4 * 10 * 1024 * context)
    assert (seconds, bound) == (pytest.approx(flops / H100_FLOPS), "products")
    engine = {"format": "int8", "bf16_first_layers": 0, "bf16_last_layers": 0}
    faster, _ = forward_s(planned(engine=engine), given(), requests, context)
    assert seconds - faster == pytest.approx(requests * 2 * LINEAR * (1 / H100_FLOPS - 1 / H100_8_BIT))


@pytest.mark.parametrize(("format", "share"), [("bf16", 1.0), ("fp8_channel", 1.0), ("int8", 0.5)])
def test_a_gpu_without_products_in_8_bits_multiplies_in_bf16(format: str, share: float) -> None:
    """An A100 has INT8 and no FP8; without its products every format would have the same time."""
    a100 = given(gpu=GPUS["a100"])
    seconds = a100.product_s(312e12, eight_bit=float(format != "bf16"), int8=format == "int8")
    assert seconds == pytest.approx(share)


def test_tensor_parallel_engines_add_two_all_reduces_a_layer() -> None:
    run = planned(gpus=2, engine={"tensor_parallel": 2}, trainer={"parallel": {"data": 2}})
    without, _ = forward_s(run, given(), 16, context=100)
    slower, _ = forward_s(run, given(all_reduce_latency_s=1e-5), 16, context=100)
    assert slower - without == pytest.approx(2 * 10 * 1e-5)
    nvlink_s = 2 * 10 * (2 * 16 * 1024 * 2) / 2 / 450e9
    alone_s = (2 * (num_parameters(SPEC) - OUTPUT) + 16 * 100 * KV_BYTES) / 2 / H100_BYTES_S
    assert without == pytest.approx(alone_s + nvlink_s)


def token_by_token(run, assumed, lengths, seats: int) -> float:
    """Every forward of an engine, one after another."""
    waiting, running, seconds = [[length, 0] for length in lengths], [], 0.0
    while waiting or running:
        while waiting and len(running) < seats:
            running.append(waiting.pop(0))
        context = assumed.lengths.prompt + np.mean([done + 0.5 for _, done in running])
        seconds += forward_s(run, assumed, len(running), context)[0]
        running = [[length, done + 1] for length, done in running if done + 1 < length]
    return seconds


@pytest.mark.parametrize("seats", [1, 4, 50])
def test_sampling_equals_a_walk_from_token_to_token(seats: int) -> None:
    run, assumed = planned(), given(forward_overhead_s=1e-4)
    lengths = np.random.default_rng(0).integers(1, 60, size=40).astype(float)
    assert sampling_s(run, assumed, lengths, seats) == pytest.approx(token_by_token(run, assumed, lengths, seats))


def test_drafts_shorten_sampling_while_memory_is_the_bound() -> None:
    run, lengths = planned(), np.full(8, 100.0)
    plain = sampling_s(run, given(), lengths, 8)
    drafting = stated_lengths(prompt=100, response=200, longest=800, tokens_per_forward=2)
    drafted = sampling_s(run, given(lengths=drafting, verified_tokens=3), lengths, 8)
    assert drafted == pytest.approx(plain / 2, rel=0.01)


def test_seats_are_bound_by_the_key_that_is_named() -> None:
    few = rollout_estimate(planned(engine={"max_num_seqs": 3}), given())
    assert (few.seats, few.seats_by) == (3, "engine.max_num_seqs")
    small = rollout_estimate(planned(engine={"kv_cache_bytes": KV_BYTES * 200 * 5}), given())
    assert (small.seats, small.seats_by) == (5, "engine.kv_cache_bytes")
    codes = rollout_estimate(planned(engine={"kv_cache_bytes": KV_BYTES * 200 * 5, "kv_format": "fp8"}), given())
    assert (codes.seats, codes.seats_by) == (10, "engine.kv_cache_bytes")
    short = rollout_estimate(planned(algorithm={"prompts_per_step": 2, "group_size": 2}), given())
    assert (short.seats, short.seats_by) == (4, "algorithm.prompts_per_step")
    for estimate in (few, small, codes, short):
        assert estimate.seconds >= estimate.saturated_s


def test_one_update_is_six_operations_a_weight_and_the_output_layer_eight() -> None:
    run = planned(algorithm={"prompts_per_step": 4, "group_size": 4})
    estimate = train_estimate(run, given())
    lengths = 100 + given().lengths.of(16)
    attention = 3 * 2 * 10 * 1024 * np.square(lengths).sum()
    flops = lengths.sum() * (6 * LINEAR + 8 * OUTPUT) + attention
    assert estimate.products_s == pytest.approx(flops / H100_FLOPS)
    assert (estimate.communication_s, estimate.pipeline_s, estimate.num_updates) == (0, 0, 1)


def test_recomputation_and_old_logprobs_add_a_forward_each() -> None:
    algorithm = {"prompts_per_step": 4, "group_size": 4}
    base = train_estimate(planned(algorithm=algorithm), given()).products_s
    lengths = 100 + given().lengths.of(16)
    layers = (lengths.sum() * 2 * LINEAR + 2 * 10 * 1024 * np.square(lengths).sum()) / H100_FLOPS
    output = lengths.sum() * 2 * OUTPUT / H100_FLOPS
    full = planned(algorithm=algorithm, trainer={"recompute": "full"})
    assert train_estimate(full, given()).products_s - base == pytest.approx(layers)
    twice = planned(algorithm={**algorithm, "num_mini_batches": 2})
    assert train_estimate(twice, given()).products_s - base == pytest.approx(layers + output)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_blocks_of_recomputed_layers_are_counted_in_every_stage(pipeline: int) -> None:
    """The model has 10 layers."""
    parallel = {"parallel": {"pipeline": pipeline}}

    def products_s(recompute: str, **megatron: object) -> float:
        trainer = {**parallel, "recompute": recompute, "megatron": megatron}
        return train_estimate(planned(gpus=pipeline, trainer=trainer), given()).products_s

    base, full = products_s("none"), products_s("full")
    assert products_s("full", recompute_num_layers=5) == full
    blocks = products_s("full", recompute_method="block", recompute_num_layers=3)
    assert blocks - base == pytest.approx(3 * pipeline / 10 * (full - base))
    assert products_s("full", recompute_method="block", recompute_num_layers=99) == full


def test_selective_recomputation_adds_a_forward_of_attention() -> None:
    algorithm = {"prompts_per_step": 4, "group_size": 4}
    base, selective = (
        train_estimate(planned(algorithm=algorithm, trainer={"recompute": recompute}), given())
        for recompute in ("none", "selective")
    )
    lengths = 100 + given().lengths.of(16)
    attention = 2 * 10 * 1024 * np.square(lengths).sum() / H100_FLOPS
    assert selective.products_s - base.products_s == pytest.approx(attention)
    assert selective.communication_s == base.communication_s


def test_products_in_fp32_take_twice_as_long() -> None:
    bf16, fp32 = (train_estimate(planned(trainer={"dtype": dtype}), given()).products_s for dtype in ("bf16", "fp32"))
    assert fp32 == pytest.approx(2 * bf16)


def test_a_pipeline_waits_for_its_stages() -> None:
    trainer = {"parallel": {"pipeline": 2}, "max_micro_batch_tokens": 1000}
    run = planned(gpus=2, algorithm={"prompts_per_step": 4, "group_size": 4}, trainer=trainer)
    estimate = train_estimate(run, given())
    assert estimate.pipeline_s == pytest.approx(estimate.products_s / (estimate.tokens / 1000))


def test_gradients_between_nodes_take_the_network() -> None:
    inside = train_estimate(planned(gpus=8, trainer={"parallel": {"data": 8}}), given()).optimizer_s
    between = planned(gpus=8, nodes=2, trainer={"parallel": {"data": 16}})
    assert train_estimate(between, given()).optimizer_s > 5 * inside


def test_weights_travel_once_to_each_device() -> None:
    weights = 2 * num_parameters(SPEC)
    beside = planned(gpus=4, trainer={"parallel": {"data": 4}}, engine={"num_engines": 4})
    assert beside.placement.transport == "cuda_ipc"
    assert publish_estimate(beside, given()).travel_s == pytest.approx(weights * 3 / 4 / 450e9)
    publish = {"bucket_bytes": 1 << 27}
    apart = planned(gpus=4, placement={"mode": "disaggregated"}, engine={"num_engines": 3}, publish=publish)
    assert apart.placement.transport == "nccl"
    assert publish_estimate(apart, given()).travel_s == pytest.approx((weights + 2 * (1 << 27)) / 450e9)


def test_switches_move_what_is_offloaded_out_and_back() -> None:
    assert publish_estimate(planned(), given()).switch_s == 0
    turns = planned(trainer={"offload": "all"}, engine={"sleep_level": 1})
    parameters = num_parameters(SPEC)
    assert publish_estimate(turns, given()).switch_s == pytest.approx(2 * (14 + 2) * parameters / 64e9, rel=0.001)


def test_states_in_host_memory_move_in_every_update_and_not_between_phases() -> None:
    on_host = {"optimizer": {"states_on_host": True}}
    turns = planned(trainer={"offload": "all", **on_host}, engine={"sleep_level": 1})
    parameters = num_parameters(SPEC)
    assert publish_estimate(turns, given()).switch_s == pytest.approx(2 * (2 + 2) * parameters / 64e9, rel=0.001)
    algorithm = {"num_mini_batches": 4}
    beside, hosted = (planned(trainer=trainer, algorithm=algorithm) for trainer in ({}, on_host))
    more = train_estimate(hosted, given()).optimizer_s - train_estimate(beside, given()).optimizer_s
    assert more == pytest.approx(4 * 2 * 12 * parameters / 64e9, rel=0.001)


def test_phases_follow_each_other_or_the_slower_side_decides() -> None:
    estimate = step_estimate(planned(), given(), num_gpus=1)
    parts = estimate.rollout.seconds + estimate.train.seconds + estimate.publish.seconds
    assert estimate.step_s == pytest.approx(parts)
    assert estimate.gpu_hours == pytest.approx(10 * estimate.step_s / 3600)
    ahead = {"planner": {"overlap": 1, "max_staleness": 1}, "placement": {"mode": "disaggregated"}}
    apart = step_estimate(planned(gpus=2, **ahead), given(), num_gpus=2)
    sides = (apart.rollout.saturated_s + apart.publish.load_s, apart.train.seconds + apart.publish.seconds)
    assert apart.step_s == pytest.approx(max(sides))
