"""Engines of two ranks: answers of one that loaded a directory and of one that received the weights.

`python -m tests.support.engines.parallel_formats CHECKPOINTS ANSWERS`; writes {family: {loaded: ..., sent: ...}}.
"""

import asyncio
import json
import sys
from pathlib import Path

from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.spec import EngineSpec
from tests.support.deadline import DEADLINE_S
from tests.support.engines.engine_answers import Checkpoints
from tests.support.engines.live import Live
from tests.support.engines.packing import RUN_ID

CASES = {"blocks": "fp8_block", "experts": "bf16"}
"""Family to format. Blocks are whole on both ranks, each expert is cut. Channels are cut as INT8's, which
`test_engine_parallel` has."""


def main() -> None:
    checkpoints, target = Checkpoints(Path(sys.argv[1])), Path(sys.argv[2])
    found = {}
    with asyncio.Runner() as runner:
        for family, format in CASES.items():
            loaded = start(runner, checkpoints, family, format, load=True)
            found[family] = {"loaded": answers_and_end(runner, loaded)}
            sent = start(runner, checkpoints, family, format, load=False)
            required = [
                sum(box.size for boxes in one.values() for box in boxes) for one in sent.engine.weights.required
            ]
            found[family] |= {"required": required, "sent": answers_and_end(runner, sent)}
    target.write_text(json.dumps(found))


def start(runner: asyncio.Runner, checkpoints: Checkpoints, family: str, format: str, *, load: bool) -> Live:
    """An engine that serves weights B; if it does not load them, they are pushed after weights A."""
    config = EngineConfig(
        tensor_parallel=2,
        format=format,
        bf16_first_layers=0,
        bf16_last_layers=0,
        kv_cache_bytes=32 << 20,
        max_num_seqs=16,
        update_timeout_s=DEADLINE_S,
    )
    directory = checkpoints.path(family, "B" if load else "A", format)
    spec = EngineSpec(
        engine_id=int(load),
        run_id=RUN_ID,
        config=config,
        directory=str(directory),
        max_model_len=256,
        load_from_directory=load,
    )
    live = Live(Engine(spec), runner, checkpoints, format, family=family)
    runner.run(live.engine.start())
    if not load:
        runner.run(live.use_shm())
        for weights in "AB":
            runner.run(live.push(weights))
    return live


def answers_and_end(runner: asyncio.Runner, live: Live) -> dict[str, list]:
    answers = runner.run(live.greedy())
    live.engine.shutdown()
    for sender in live.senders:
        sender.abandon()
    return answers


if __name__ == "__main__":
    main()
