import json
import time

import numpy as np
import pytest
import torch

from megatron_rl.batching.cost_model import CostModel, MeasuredTimes, attention_parity_tokens, cost_model
from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.model.spec import ModelSpec, read_model_spec
from megatron_rl.trainer.pipeline import MicroBatchClock


def spec(directory, **changes) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 500,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config | changes))
    return read_model_spec(directory)


def multiply_adds(found: ModelSpec, length: int) -> tuple[int, int]:
    """Multiply-adds of linear layers and of causal attention for one sample of `length` tokens, product by product."""
    hidden, head, query = found.hidden_size, found.head_dim, found.num_heads * found.head_dim
    key_value = found.num_kv_heads * head
    networks = found.experts.per_token if found.experts else 1
    router = hidden * found.experts.count if found.experts else 0
    projections = hidden * query + 2 * hidden * key_value + query * hidden
    layer = length * (projections + networks * 3 * hidden * found.ffn_size + router)
    pairs = sum(position + 1 for position in range(length))
    attention = 2 * found.num_heads * head * pairs  # scores, then their use
    return found.num_layers * layer + length * hidden * found.vocab_size, found.num_layers * attention


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 32},
        {
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ],
)
def test_attention_and_linear_layers_cost_the_same_at_the_parity_length(tmp_path, changes):
    found = spec(tmp_path, **changes)
    linear, attention = multiply_adds(found, attention_parity_tokens(found))
    assert attention == pytest.approx(linear, rel=0.01)


def test_a_configured_parity_length_overrides_the_architectures(tmp_path):
    found = spec(tmp_path)
    parallel = ParallelConfig(pipeline=2)
    counted = cost_model(found, TrainerConfig(parallel=parallel))
    assert counted == CostModel(parity_tokens=attention_parity_tokens(found), pipeline=2)
    assert cost_model(found, TrainerConfig(attention_parity_tokens=777)).parity_tokens == 777


def test_a_pipeline_is_filled_once_for_every_further_stage():
    flat, deep = (
        CostModel(parity_tokens=10, overhead_tokens=1),
        CostModel(parity_tokens=10, overhead_tokens=1, pipeline=3),
    )
    assert flat.rank_time([[10], [10, 10], []]) == 20 + 40 + 3
    assert deep.rank_time([[10], [10, 10], []]) == 63 + 2 * 41


def timed(count: int, *, noise: float = 0.0, overhead_s: float = 0.02) -> MeasuredTimes:
    generator, times = np.random.default_rng(0), MeasuredTimes()
    for _ in range(count):
        lengths = generator.integers(100, 8000, size=int(generator.integers(1, 6)))
        seconds = overhead_s + 1e-5 * lengths.sum() + 5e-10 * np.square(lengths).sum()
        times.add(lengths, float(seconds * (1 + noise * generator.standard_normal())))
    return times


def test_the_fit_recovers_the_coefficients():
    found = timed(50).fit()
    assert found is not None
    assert (found.overhead_s, found.seconds_per_token, found.seconds_per_square) == pytest.approx((0.02, 1e-5, 5e-10))
    assert found.parity_tokens == pytest.approx(20_000)


def test_noise_changes_the_parity_length_little():
    found = timed(500, noise=0.02).fit()
    assert found is not None and found.parity_tokens == pytest.approx(20_000, rel=0.1)


def test_an_overhead_is_not_negative():
    found = timed(50, overhead_s=-0.01).fit()
    assert found is not None and found.overhead_s == 0.0
    assert 0 < found.seconds_per_token < 1e-5


def test_too_few_or_equal_micro_batches_give_no_fit():
    assert timed(4).fit() is None
    equal = MeasuredTimes()
    for _ in range(100):
        equal.add(np.array([1000, 1000]), 0.1)
    assert equal.fit() is None


def test_the_last_micro_batch_of_a_step_is_not_timed():
    clock = MicroBatchClock(torch.device("cpu"))
    for seconds in (0.0, 0.02, 0.0):
        clock.begin()
        time.sleep(seconds)
    first, second = clock.seconds()
    assert first >= 0
    assert second >= 0.02
