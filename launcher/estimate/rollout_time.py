"""Estimate of the seconds in which the engines sample one step. Pure.

A forward of n requests takes the longer of its bytes over the bandwidth (weights once, keys and values of every
request) and its operations over the peak, plus an all-reduce after attention and after the feed-forward network of each
layer, plus a fixed overhead. The requests of one engine run in its seats: as many as `engine.max_num_seqs` and the KV
cache allow. A waiting request takes a seat when one is free. Responses are assumed to arrive in random order.

`sampling_s` walks from one finished response to the next (not from token to token): between them the number of requests
is constant and contexts grow evenly, so the forward at half of the way stands for all.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from launcher.estimate.lengths import Floats
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.roofline import (
    Assumptions,
    all_reduce_bytes,
    attention_flops,
    eight_bit_share,
    linear_weights,
    output_weights,
)
from megatron_rl.memory import expert_parameters, kv_bytes_per_token
from rollout.weights.format import WeightFormat

_STRIDE = 0.6180339887498949
"""Golden ratio: its multiples modulo 1 are an even, repeatable shuffle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEstimate:
    """One step of an engine."""

    seconds: float
    """Until the engine's last response is finished."""
    saturated_s: float
    """The same tokens on an engine whose seats are always taken."""
    prefill_s: float
    """Part of `seconds` in which prompts are processed."""
    seats: int
    """Requests at a time."""
    seats_by: str
    """The key that bounds the seats."""
    forward_s: float
    """A forward with all seats taken, at half of the mean length."""
    forward_by: str
    """`memory` or `products`: the bound of that forward."""


def rollout_estimate(run: PlannedRun, given: Assumptions) -> RolloutEstimate:
    """The engines share a step's responses evenly; all engines are alike."""
    config, lengths = run.config, given.lengths
    per_engine = -(-config.algorithm.prompts_per_step * config.algorithm.group_size // config.engine.num_engines)
    tensor = config.engine.tensor_parallel
    context = lengths.prompt + lengths.response / 2
    cached = config.engine.kv_cache_bytes / kv_bytes_per_token(run.spec, tensor, config.engine.kv_format)
    fitting = max(1, int(cached / context))
    seats = min(config.engine.max_num_seqs, fitting, per_engine)
    bound = {config.engine.max_num_seqs: "engine.max_num_seqs", fitting: "engine.kv_cache_bytes"}
    order = np.argsort(np.arange(per_engine) * _STRIDE % 1.0)
    prefill_s = _prefill_s(run, given, per_engine / config.algorithm.group_size)
    decode_s = sampling_s(run, given, lengths.of(per_engine)[order], seats)
    full_s, by = forward_s(run, given, seats, context)
    forwards = per_engine * lengths.response / lengths.tokens_per_forward / seats
    return RolloutEstimate(
        seconds=prefill_s + decode_s,
        saturated_s=prefill_s + forwards * full_s,
        prefill_s=prefill_s,
        seats=seats,
        seats_by=bound.get(seats, "algorithm.prompts_per_step"),
        forward_s=full_s,
        forward_by=by,
    )


def sampling_s(run: PlannedRun, given: Assumptions, responses: Floats, seats: int) -> float:
    """Seconds in which one engine samples responses of these lengths, in this order."""
    num_forwards = np.ceil(responses / given.lengths.tokens_per_forward)
    waiting = list(num_forwards[::-1])
    running: list[float] = []  # number of the forward after which a request is finished
    started = 0.0  # sum over running requests of the number of their first forward
    starts: dict[float, list[float]] = {}
    now, seconds = 0.0, 0.0
    while waiting or running:
        while waiting and len(running) < seats:
            end = now + waiting.pop()
            heapq.heappush(running, end)
            starts.setdefault(end, []).append(now)
            started += now
        end = running[0]
        emitted = given.lengths.tokens_per_forward * ((now + end) / 2 - started / len(running))
        one_s, _ = forward_s(run, given, len(running), given.lengths.prompt + emitted)
        seconds += (end - now) * one_s
        now = end
        while running and running[0] == now:
            heapq.heappop(running)
            started -= starts[now].pop()
    return seconds


def forward_s(run: PlannedRun, given: Assumptions, requests: int, context: float) -> tuple[float, str]:
    """Seconds of a forward of `requests` with `context` tokens each, and its bound."""
    spec, engine = run.spec, run.config.engine
    tensor, tokens = engine.tensor_parallel, requests * given.verified_tokens
    kv_bytes = requests * context * kv_bytes_per_token(spec, tensor, engine.kv_format)
    memory_s = (_weights_read(run, tokens) / tensor + kv_bytes) / given.memory_bytes_s
    products_s = _products_s(run, given, tokens=tokens, scored=tokens, pairs=tokens * context)
    return max(memory_s, products_s) + _communication_s(run, given, tokens) + given.forward_overhead_s, (
        "memory" if memory_s >= products_s else "products"
    )


def _prefill_s(run: PlannedRun, given: Assumptions, num_prompts: float) -> float:
    """Prompts are processed once a group, because its responses share the cached prefix."""
    prompt = given.lengths.prompt
    pairs = num_prompts * prompt * prompt / 2
    products_s = _products_s(run, given, tokens=num_prompts * prompt, scored=num_prompts, pairs=pairs)
    return products_s + _communication_s(run, given, num_prompts * prompt)


def _products_s(run: PlannedRun, given: Assumptions, *, tokens: float, scored: float, pairs: float) -> float:
    """Seconds of one rank's products; `scored` tokens have logits."""
    spec, engine = run.spec, run.config.engine
    format = WeightFormat.of(engine)
    linear = 2.0 * linear_weights(spec) * tokens / engine.tensor_parallel
    rest = (2.0 * output_weights(spec) * scored + attention_flops(spec, pairs)) / engine.tensor_parallel
    share = eight_bit_share(spec, format)
    return given.product_s(linear, eight_bit=share, int8=format.name == "int8") + given.product_s(rest)


def _communication_s(run: PlannedRun, given: Assumptions, tokens: float) -> float:
    """Two all-reduces a layer over NVLink."""
    tensor = run.config.engine.tensor_parallel
    if tensor == 1:
        return 0.0
    one_s = all_reduce_bytes(2.0 * tokens * run.spec.hidden_size, tensor) / given.nvlink_bytes_s
    return 2 * run.spec.num_layers * (one_s + given.all_reduce_latency_s)


def _weights_read(run: PlannedRun, tokens: float) -> float:
    """Bytes of weights that a forward reads: all but an untied embedding, of which it reads a few rows. Of experts,
    those to which any of `tokens` is sent, if routing is even.
    """
    spec = run.spec
    read = float(run.publish_bytes - (0 if spec.tied else 2 * output_weights(spec)))
    if spec.experts is None:
        return read
    width = 2.0 - eight_bit_share(spec, WeightFormat.of(run.config.engine))
    unused = math.pow(1.0 - spec.experts.per_token / spec.experts.count, tokens)
    return read - unused * width * expert_parameters(spec)
