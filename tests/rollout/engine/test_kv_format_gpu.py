"""FP8 keys and values on a CUDA device: scales follow a publish, also in captured CUDA graphs."""

import numpy as np
import pytest
import torch

from tests.rollout.conftest import engine_environment
from tests.rollout.engine.test_kv_format import (
    MARGIN_PER_CODE,
    largest_by_hugging_face,
    published,
    with_larger_keys_and_values,
)
from tests.support.engines.live import Live
from tests.support.engines.oracle import PROBE
from tests.support.engines.packing import RUN_ID

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with FP8",
    ),
]


@pytest.fixture(scope="module")
def fp8(checkpoints, loop):
    from rollout.config import EngineConfig
    from rollout.engine.engine import Engine
    from rollout.engine.spec import EngineSpec

    backend = "FLASH_ATTN" if torch.cuda.get_device_capability() == (9, 0) else "TRITON_ATTN"
    config = EngineConfig(kv_format="fp8", kv_cache_bytes=1 << 30, max_num_seqs=16, vllm={"attention_backend": backend})
    directory = checkpoints.path("blocks", "A", "bf16")  # heads of 128, as in real models
    spec = EngineSpec(engine_id=0, run_id=RUN_ID, config=config, directory=str(directory), max_model_len=256)
    with engine_environment():
        started = Live(Engine(spec), loop, checkpoints, "bf16", family="blocks")
        loop.run(started.engine.start())
        loop.run(started.use_shm())
        yield started
        started.close()


def test_scales_follow_each_publish_and_decoding_reads_them(fp8, loop, checkpoints):
    a = fp8.tensors("A")
    probe, scales = published(fp8, loop, a)
    expected = largest_by_hugging_face(checkpoints.path("blocks", "A", "bf16")) * MARGIN_PER_CODE
    assert scales[0] == pytest.approx(expected[0], rel=2**-6)
    assert scales[1] == pytest.approx(expected[1], rel=2**-3)
    answers = loop.run(fp8.greedy())

    probe_of_scaled, scales_of_scaled = published(fp8, loop, with_larger_keys_and_values(a))
    assert scales_of_scaled == pytest.approx(scales * [8, 4], rel=2**-5)
    # decoding runs in graphs captured before the first publish; old scales would read 8 times smaller keys
    answers_of_scaled = loop.run(fp8.greedy())
    for one, other in ((probe, probe_of_scaled), (answers["logprobs"][0][:1], answers_of_scaled["logprobs"][0][:1])):
        assert np.abs(np.subtract(one, other)).mean() < 0.1
    same = np.mean(np.equal(answers["tokens"][2][:5], answers_of_scaled["tokens"][2][:5]))
    assert same > 0.5

    published(fp8, loop, fp8.tensors("B"))
    again, scales_again = published(fp8, loop, a)
    assert again == pytest.approx(probe, abs=1e-3)
    assert scales_again == pytest.approx(scales, rel=1e-3)
    assert loop.run(fp8.engine.weights.probe(PROBE)) == pytest.approx(again, abs=1e-3)
