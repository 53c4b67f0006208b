"""Sleep, wake and late updates of an engine's weights over stand-ins for its ranks.

The allocator is that of vLLM 0.25. Its `vllm/device_allocator/cumem.py` keeps no record: `sleep` unmaps all memory and
`wake_up` maps each given part, whether it was mapped or not. CUDA refuses both the second time.
"""

import asyncio
import pickle
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from rollout.config import EngineConfig
from rollout.engine import weights as weights_module
from rollout.engine.responses import ResponseLedger
from rollout.engine.spec import EngineSpec
from rollout.engine.state import EngineFencedError, EngineStatus
from rollout.engine.weights import EngineWeights
from rollout.types import WeightVersion
from rollout.weights.fingerprint_sums import NUM_GROUPS, Lenience
from rollout.weights.manifest import WeightManifest
from rollout.worker.receiver import Loaded

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


SUMS = np.ones((2, 1, NUM_GROUPS))


class LateRanks(Ranks):
    """Ranks whose first update ends when `goes_on` says so, with weights that are not those of the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()

    async def ranks(self, method: str, *args: object) -> list[object]:
        self.calls.append(method)
        await asyncio.sleep(0)
        if method == "apply_weights":
            is_first = self.calls.count(method) == 1
            if is_first:
                await self.goes_on.wait()
            self.calls.append("applied")
            return [pickle.dumps(Loaded(sums={"w": SUMS * (0.5 if is_first else 1.0)}, received_bytes=1))]
        return [[-1.0] if method == "probe" else True]


def manifest_of(version: int) -> WeightManifest:
    return WeightManifest(
        run_id="run",
        weight_version=WeightVersion(version),
        format=EngineConfig().format,
        tensors=(),
        buckets=(),
    )


def test_an_update_that_was_given_up_ends_before_the_next_begins_and_serves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ranks may have read memory that the trainer had released, and so hold wrong weights."""
    ranks = LateRanks()
    spec = EngineSpec(engine_id=0, run_id="run", config=EngineConfig(), directory="", max_model_len=8)
    late = EngineWeights(spec, ranks, ResponseLedger(), sync_vllm=nothing, submit_again=nothing)  # type: ignore[arg-type]
    late.status, late.version = EngineStatus.SERVING, WeightVersion(3)

    async def run() -> None:
        given_up = asyncio.create_task(late.update(manifest_of(4)))
        await until(lambda: "apply_weights" in ranks.calls)
        assert late.status is EngineStatus.APPLYING
        again = asyncio.create_task(late.update(manifest_of(4)))  # the publish is repeated
        await until(lambda: False)
        assert ranks.calls.count("expect_weights") == 1, "the second update waits for the first"
        ranks.goes_on.set()
        await given_up
        assert (late.status, late.sums["w"].max()) == (EngineStatus.APPLYING, 0.5)
        await again
        assert (await late.prove({"w": SUMS}, Lenience(), [1, 2])).weight_gap == 0, "of the second update"
        assert late.status is EngineStatus.APPLYING
        await late.resume()
        assert late.status is EngineStatus.SERVING
        order = [call for call in ranks.calls if call in ("expect_weights", "apply_weights", "applied")]
        assert order == ["expect_weights", "apply_weights", "applied"] * 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("bucket 3: checksum"), "failed: bucket 3: checksum"), (None, "failed: the ranks do not answer")],
)
def test_the_fault_of_an_update_names_its_reason(
    error: RuntimeError | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(LateRanks):
        async def ranks(self, method: str, *args: object) -> list[object]:
            if method == "apply_weights" and error is not None:
                raise error
            return await super().ranks(method, *args)

    config = EngineConfig(update_timeout_s=0.1)
    spec = EngineSpec(engine_id=0, run_id="run", config=config, directory="", max_model_len=8)
    late = EngineWeights(spec, Failing(), ResponseLedger(), sync_vllm=nothing, submit_again=nothing)  # type: ignore[arg-type]
    monkeypatch.setattr(weights_module, "GRACE_S", 0.0)
    with pytest.raises(EngineFencedError, match=said):
        asyncio.run(late.update(manifest_of(4)))
    assert late.status is EngineStatus.FENCED


async def until(is_so: Callable[[], bool]) -> None:
    """Let the other tasks run until something is so, or for long."""
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0)
