"""Fixtures around real engines: one oracle process, and engines that are started once."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout.process_env import ProcessEnv

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Checkpoints:
    """Directories of tiny models by (family, weights, format); weights are `A` or `B`."""

    root: Path

    def path(self, family: str, weights: str, format: str) -> Path:
        return self.root / f"{family}-{weights}-{format}"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Checkpoints:
    from tests.rollout.tiny_models import FAMILIES, in_format, make_weights, save_checkpoint

    found = Checkpoints(tmp_path_factory.mktemp("checkpoints"))
    for family in FAMILIES:
        for weights, seed in (("A", 1), ("B", 2)):
            tensors = make_weights(family, seed)
            for format in ("bf16", "int8", "fp8_channel", "fp8_block"):
                save_checkpoint(found.path(family, weights, format), family, in_format(tensors, format), format)
    return found


@dataclass(frozen=True)
class Oracle:
    """Answers of `tests.rollout.oracle`, by job name."""

    answers: dict[str, list[dict]]

    def fresh(self, family: str, weights: str, format: str, *, onednn: bool = False) -> dict:
        return self.answers[f"fresh-{family}-{weights}-{format}{'-onednn' * onednn}"][0]


def _jobs(checkpoints: Checkpoints) -> list[dict]:
    def job(kind: str, family: str, weights: str, format: str, **more: object) -> dict:
        suffix = "".join(f"-{key}" for key in more)
        directories = [str(checkpoints.path(family, each, format)) for each in weights]
        return {
            "name": f"{kind}-{family}-{weights}-{format}{suffix}",
            "format": format,
            "directories": directories,
            **more,
        }

    cases = [("qwen3", "bf16"), ("qwen3", "int8"), ("qwen2", "bf16"), ("qwen2", "int8"), ("llama", "int8")]
    cases += [("qwen2", "fp8_channel"), ("blocks", "fp8_block")]
    jobs = [job("fresh", family, weights, format) for family, format in cases for weights in ("A", "B")]
    jobs += [job("push", family, "ABA", format) for family, format in cases]
    jobs += [job("fresh", "qwen3", weights, "int8", onednn=True) for weights in ("A", "B")]
    jobs += [job("push", "qwen3", "ABA", "int8", onednn=True)]
    jobs += [job("push", "qwen2", "AB", "bf16", without_quirk="tied_head_multiplies_by_old_embedding_after_reload")]
    return jobs


@pytest.fixture(scope="session")
def oracle(checkpoints, tmp_path_factory) -> Oracle:
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "jobs.json").write_text(json.dumps(_jobs(checkpoints)))
    environment = os.environ | ProcessEnv(single_node=True).engine(threads=1) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.rollout.oracle", str(folder / "jobs.json"), str(folder / "answers.json")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads((folder / "answers.json").read_text())
    return Oracle({job["name"]: job["answers"] for job in answers})


@pytest.fixture(scope="package")
def loop() -> Iterator[asyncio.Runner]:
    """The event loop that all engines of this package's tests live on."""
    with asyncio.Runner() as runner:
        yield runner


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
    """The directory of an engine whose responses end at their limit: a configuration without end-of-sequence id."""
    config = json.loads((checkpoints.path("qwen3", "A", "bf16") / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="package")
def live(checkpoints, loop, tmp_path_factory):
    """A BF16 engine of one rank, serving weights A as version 0."""
    from rollout.config import EngineConfig
    from rollout.engine import Engine
    from rollout.engine_config import EngineSpec
    from tests.rollout.live import Live
    from tests.rollout.packing import RUN_ID

    passed_on = {"max_logprobs": 256, "max_num_batched_tokens": 64}
    config = EngineConfig(kv_cache_bytes=64 << 20, max_num_seqs=16, update_timeout_s=10, vllm=passed_on)
    directory = endless(checkpoints, tmp_path_factory.mktemp("endless"))
    spec = EngineSpec(engine_id=3, run_id=RUN_ID, config=config, directory=str(directory), max_model_len=256)
    started = Live(Engine(spec), loop, checkpoints, "bf16")
    with engine_environment():
        loop.run(_first_publish(started))
    yield started
    started.engine.shutdown()
    for sender in started.senders:
        sender.abandon()


async def _first_publish(live) -> None:
    await live.engine.start()
    await live.use_shm()
    early = asyncio.create_task(live.sample())
    done, _ = await asyncio.wait([early], timeout=1)
    live.before_publish_0 = not done and live.engine.state().weight_version == -1
    await live.push("A")
    summary, _ = await early
    live.before_publish_0 &= summary.oldest_version == 0
