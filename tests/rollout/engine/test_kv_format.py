"""An engine with FP8 keys and values: its scales follow each publish, and its log-probabilities stay close to BF16."""

import numpy as np
import pytest
import torch

from launcher.cluster.node import node_resources
from tests.rollout.conftest import endless, engine_environment
from tests.support.engines.live import Live
from tests.support.engines.oracle import PROBE
from tests.support.engines.packing import RUN_ID, pack

pytestmark = pytest.mark.skipif(
    not node_resources().has_avx512,
    reason="vLLM has no FP8 keys and values on CPUs without AVX-512, where `kv_format_problems` refuses a run",
)

MARGIN_PER_CODE = 4 / 448
LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]


@pytest.fixture(scope="module")
def fp8(checkpoints, loop, tmp_path_factory):
    """An engine with BF16 weights and FP8 keys and values, before its first publish."""
    from rollout.config import EngineConfig
    from rollout.engine.engine import Engine
    from rollout.engine.spec import EngineSpec

    config = EngineConfig(kv_format="fp8", kv_cache_bytes=64 << 20, max_num_seqs=16, update_timeout_s=10)
    directory = endless(checkpoints, tmp_path_factory.mktemp("fp8"))
    spec = EngineSpec(engine_id=4, run_id=RUN_ID, config=config, directory=str(directory), max_model_len=256)
    started = Live(Engine(spec), loop, checkpoints, "bf16")
    with engine_environment():
        loop.run(started.engine.start())
    loop.run(started.use_shm())
    yield started
    started.close()


def published(fp8: Live, loop, tensors: dict[str, torch.Tensor]) -> tuple[list[float], np.ndarray]:
    """Publish as a run does; returns the probe, and scales of keys and values by layer, [2 layers, 2]."""
    weights = fp8.engine.weights
    publish = pack(tensors, fp8.engine.state().weight_version + 1, "bf16", num_ranks=2, required=weights.required)
    loop.run(weights.update(publish.manifest, fp8.stage(publish)))
    probe = loop.run(weights.probe(PROBE))
    loop.run(weights.resume())
    (scales,) = loop.run(fp8.engine._handle.ranks("kv_scales"))
    assert [row[0] for row in scales] == LAYERS
    return probe, np.array([row[1:] for row in scales])


def largest_by_hugging_face(directory) -> np.ndarray:
    """Largest absolute key and value of the probe prompt by layer, from the cache of a BF16 forward, [2 layers, 2]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        cache = model(torch.tensor([PROBE]), use_cache=True).past_key_values
    return np.array([[float(part.abs().max()) for part in layer] for layer in ((x[0], x[1]) for x in cache)])


def with_larger_keys_and_values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same function with keys 8 times and values 4 times as large, which queries and outputs make undone."""
    factors = {"k_norm": 8, "q_norm": 1 / 8, "v_proj": 4, "o_proj": 1 / 4}
    return {name: tensor * factors.get(name.split(".")[-2], 1) for name, tensor in tensors.items()}


def test_keys_and_values_in_fp8_have_scales_of_each_publish_and_change_little(fp8, live, loop, checkpoints):
    a, b = fp8.tensors("A"), fp8.tensors("B")
    probe, scales = published(fp8, loop, a)
    # layer 0 sees what Hugging Face sees, layer 1 what attention made of codes
    expected = largest_by_hugging_face(checkpoints.path("qwen3", "A", "bf16")) * MARGIN_PER_CODE
    assert scales[0] == pytest.approx(expected[0], rel=2**-7)
    assert scales[1] == pytest.approx(expected[1], rel=2**-4)

    loop.run(live.use_shm())
    loop.run(live.push("A"))
    exact = loop.run(live.engine.weights.probe(PROBE))
    log_ratio = np.subtract(exact, probe)
    assert 1e-4 < (np.exp(log_ratio) - 1 - log_ratio).mean() < 0.01
    assert np.abs(log_ratio).mean() < fp8.engine.spec.config.probe_max_kv_gap / 4

    probe_of_scaled, scales_of_scaled = published(fp8, loop, with_larger_keys_and_values(a))
    assert scales_of_scaled == pytest.approx(scales * [8, 4], rel=1e-6)
    assert probe_of_scaled == pytest.approx(probe, abs=1e-6)

    # scales depend on the weights alone, and a probe between two publishes leaves them
    answers = loop.run(fp8.greedy())
    published(fp8, loop, b)
    again, scales_again = published(fp8, loop, a)
    assert again == probe and np.array_equal(scales_again, scales)
    assert loop.run(fp8.greedy())["tokens"] == answers["tokens"]
    loop.run(fp8.engine.weights.probe(list(range(60, 90))))
    (after,) = loop.run(fp8.engine._handle.ranks("kv_scales"))
    assert np.array_equal([row[1:] for row in after], scales)
