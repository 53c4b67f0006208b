"""Sleep and wake of an engine's weights over a stand-in for its ranks, whose allocator is vLLM 0.25's.

`vllm/device_allocator/cumem.py` of 0.25 keeps no record: `sleep` unmaps all memory and `wake_up` maps each given part,
whether it was mapped or not. CUDA refuses both the second time.
"""

import asyncio
from itertools import product
from types import SimpleNamespace

import pytest

from rollout.config import EngineConfig
from rollout.engine.responses import ResponseLedger
from rollout.engine.spec import EngineSpec
from rollout.engine.state import EngineStatus
from rollout.engine.weights import EngineWeights
from rollout.types import WeightVersion

PARTS = {"weights", "kv_cache"}


class Llm:
    """vLLM without requests, which notes how often it was paused."""

    def __init__(self) -> None:
        self.num_pauses = 0
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        del mode, clear_cache
        self.num_pauses += 1


class Ranks:
    """`LlmHandle` over an allocator that refuses to release what is not mapped, and to map what is."""

    def __init__(self) -> None:
        self.llm = Llm()
        self.mapped = set(PARTS)
        self.calls: list[str] = []

    async def ranks(self, method: str, *args: object) -> list[object]:
        await asyncio.sleep(0)
        if method == "sleep":
            self.calls.append("sleep")
            assert self.mapped == PARTS, "cuMemUnmap of an address that is not mapped"
            self.mapped.clear()
        else:
            ((part,),) = args
            self.calls.append(f"{method} {part}")
            assert part not in self.mapped, "cuMemMap of an address that is mapped"
            self.mapped.add(part)
        return [None]


async def nothing() -> None:
    pass


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def weights(ranks: Ranks) -> EngineWeights:
    config = EngineConfig(sleep_level=2)
    spec = EngineSpec(engine_id=0, run_id="run", config=config, directory="", max_model_len=8)
    found = EngineWeights(spec, ranks, ResponseLedger(), sync_vllm=nothing, submit_again=nothing)  # type: ignore[arg-type]
    found.status, found.version = EngineStatus.SERVING, WeightVersion(3)
    return found


def test_an_engine_that_sleeps_is_not_put_to_sleep_again_and_an_awake_part_is_not_mapped_again(
    weights: EngineWeights, ranks: Ranks
) -> None:
    async def twice() -> None:
        await asyncio.gather(weights.sleep(), weights.sleep())
        assert (weights.status, weights.version) == (EngineStatus.PAUSED, -1)
        await asyncio.gather(weights.wake("weights"), weights.wake("weights"))
        await weights.wake("kv_cache")
        await weights.wake("kv_cache")

    asyncio.run(twice())
    assert ranks.calls == ["sleep", "wake_up weights", "wake_up kv_cache"]
    assert ranks.llm.num_pauses == 1


@pytest.mark.parametrize("order", list(product(("sleep", "weights", "kv_cache"), repeat=3)))
def test_any_order_of_sleep_and_wake_maps_each_part_once(
    weights: EngineWeights, ranks: Ranks, order: tuple[str, ...]
) -> None:
    """The trainer may end while only the weights are awake, and the engine sleeps for a new one."""
    expected = set(PARTS)

    async def run() -> None:
        for step in order:
            if step == "sleep":
                await weights.sleep()
                expected.clear()
            else:
                await weights.wake(step)  # type: ignore[arg-type]
                expected.add(step)
            assert ranks.mapped == expected

    asyncio.run(run())
