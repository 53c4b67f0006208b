"""Fixtures around real engines that are started once."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout.processes import ProcessEnv
from tests.support.engines.engine_answers import Checkpoints


@pytest.fixture(scope="package")
def loop() -> Iterator[asyncio.Runner]:
    """The event loop of all engines of this package's tests."""
    with asyncio.Runner() as runner:
        yield runner


NUM_BLOCKS = 30
"""Blocks of 128 tokens in the cache of `live`: so few that 15 long responses have all of them."""


@contextmanager
def engine_environment() -> Iterator[None]:
    """The environment that an engine's processes inherit when they are started."""
    kept = dict(os.environ)
    os.environ.update(ProcessEnv(single_node=True).engine(threads=1))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def endless(checkpoints: Checkpoints, folder: Path) -> Path:
    """A model directory whose configuration has no end-of-sequence id, so that responses end at their limit."""
    config = json.loads((checkpoints.path("qwen3", "A", "bf16") / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="package")
def live(checkpoints, loop, tmp_path_factory):
    """A BF16 engine of one rank, serving weights A as version 0."""
    from rollout.config import EngineConfig
    from rollout.engine.engine import Engine
    from rollout.engine.vllm_args import EngineSpec
    from tests.support.engines.live import Live
    from tests.support.engines.packing import RUN_ID

    passed_on = {"max_logprobs": 256, "max_num_batched_tokens": 64}
    cache_bytes = 31 << 16  # vLLM's null block and `NUM_BLOCKS` that requests can have, each of 64 KiB
    config = EngineConfig(kv_cache_bytes=cache_bytes, max_num_seqs=16, update_timeout_s=10, vllm=passed_on)
    directory = endless(checkpoints, tmp_path_factory.mktemp("endless"))
    spec = EngineSpec(engine_id=3, run_id=RUN_ID, config=config, directory=str(directory), max_model_len=256)
    started = Live(Engine(spec), loop, checkpoints, "bf16")
    with engine_environment():
        loop.run(_first_publish(started))
    yield started
    started.close()


async def _first_publish(live) -> None:
    await live.engine.start()
    await live.use_shm()
    early = asyncio.create_task(live.sample())
    done, _ = await asyncio.wait([early], timeout=1)
    live.before_publish_0 = not done and live.engine.state().weight_version == -1
    await live.push("A")
    summary, _ = await early
    live.before_publish_0 &= summary.oldest_version == 0
