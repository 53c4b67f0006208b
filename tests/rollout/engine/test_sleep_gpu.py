"""An engine that releases its memory on a CUDA device and allocates it again."""

import json

import pytest
import torch

from rollout.engine.state import EngineStatus
from tests.rollout.conftest import engine_environment
from tests.support.engines.live import Live
from tests.support.engines.oracle import PROBE
from tests.support.engines.packing import RUN_ID

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_CYCLES = 20
KV_BYTES = 1 << 30


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


@pytest.fixture(params=[1, 2])
def sleeping(request, checkpoints, loop, tmp_path):
    from rollout.config import EngineConfig
    from rollout.engine.engine import Engine
    from rollout.engine.spec import EngineSpec

    config = json.loads((checkpoints.path("qwen3", "A", "int8") / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(format="int8", kv_cache_bytes=KV_BYTES, max_num_seqs=16, sleep_level=request.param)
    spec = EngineSpec(engine_id=0, run_id=RUN_ID, config=settings, directory=str(tmp_path), max_model_len=256)
    with engine_environment():
        live = Live(Engine(spec), loop, checkpoints, "int8")
        loop.run(live.engine.start())
        loop.run(live.use_shm())
        yield live
        live.close()


def test_twenty_cycles_of_sleep_release_their_memory_and_change_no_answer(sleeping, loop):
    async def cycle(version: int) -> tuple[int, list[float], dict]:
        await sleeping.engine.weights.sleep()
        free = free_bytes()
        with pytest.raises(RuntimeError, match="sleeps; wake these parts first: kv_cache, weights"):
            await sleeping.engine.weights.probe(PROBE)
        await sleeping.engine.weights.wake("weights")
        publish = sleeping.publish("A", version=version)
        await sleeping.engine.weights.update(publish.manifest, sleeping.stage(publish))
        sums = await sleeping.engine.weights.loaded_fingerprint()
        with pytest.raises(RuntimeError, match="sleeps; wake these parts first: kv_cache"):
            await sleeping.engine.weights.resume()
        await sleeping.engine.weights.wake("kv_cache")
        probe = await sleeping.engine.weights.probe(PROBE)
        await sleeping.engine.weights.resume()
        assert sleeping.engine.state().status is EngineStatus.SERVING
        return free, probe, sums

    loop.run(sleeping.push("A"))
    awake = free_bytes()
    expected = loop.run(sleeping.engine.weights.probe(PROBE))
    greedy = loop.run(sleeping.greedy())
    free = []
    for number in range(NUM_CYCLES):
        now, probe, _ = loop.run(cycle(number + 1))
        free.append(now)
        assert probe == pytest.approx(expected, abs=1e-5)
        assert loop.run(sleeping.greedy())["tokens"] == greedy["tokens"]
    assert min(free) > awake + 0.9 * KV_BYTES
    assert max(free[1:]) - min(free[1:]) < 32 << 20
    assert abs(free_bytes() - awake) < 64 << 20
