"""An engine that releases its memory on a CUDA device and allocates it again."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rollout.engine.state import EngineStatus
from tests.rollout.conftest import engine_environment
from tests.support.engines.engine_answers import Checkpoints
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


@contextmanager
def started(
    checkpoints: Checkpoints, loop: asyncio.Runner, folder: Path, *, family: str, format: str, level: int
) -> Iterator[Live]:
    """An engine that sleeps at this level."""
    from rollout.config import EngineConfig
    from rollout.engine.engine import Engine
    from rollout.engine.spec import EngineSpec

    config = json.loads((checkpoints.path(family, "A", format) / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(
        format=format,
        bf16_first_layers=0,
        bf16_last_layers=0,
        kv_cache_bytes=KV_BYTES,
        max_num_seqs=16,
        sleep_level=level,
    )
    spec = EngineSpec(engine_id=0, run_id=RUN_ID, config=settings, directory=str(folder), max_model_len=256)
    with engine_environment():
        live = Live(Engine(spec), loop, checkpoints, format, family=family)
        loop.run(live.engine.start())
        loop.run(live.use_shm())
        yield live
        live.close()


@pytest.fixture(params=[1, 2])
def sleeping(request, checkpoints, loop, tmp_path):
    with started(checkpoints, loop, tmp_path, family="qwen3", format="int8", level=request.param) as live:
        yield live


@pytest.fixture
def sleeping_experts(checkpoints, loop, tmp_path):
    with started(checkpoints, loop, tmp_path, family="experts", format="fp8_channel", level=2) as live:
        yield live


async def sleep_and_publish(live: Live, version: int) -> None:
    await live.engine.weights.sleep()
    await live.engine.weights.wake("weights")
    publish = live.publish("A", version=version)
    await live.engine.weights.update(publish.manifest, live.stage(publish))
    await live.engine.weights.wake("kv_cache")
    await live.engine.weights.resume()


def test_experts_in_fp8_answer_as_before_after_sleep_has_discarded_their_weights(sleeping_experts, loop):
    loop.run(sleeping_experts.push("A"))
    expected = loop.run(sleeping_experts.greedy())
    for number in range(2):
        loop.run(sleep_and_publish(sleeping_experts, number + 1))
        found = loop.run(sleeping_experts.greedy())
        assert found["probe"] == pytest.approx(expected["probe"], abs=1e-5)
        assert found["tokens"] == expected["tokens"]


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
