"""An INT8 engine of two ranks that receives correct and faulty weights, and one that loads a directory."""

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from megatron_rl.controller.publisher import MAX_WEIGHT_GAP
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.state import EngineFencedError, EngineState, EngineStatus
from rollout.engine.vllm_args import EngineSpec
from rollout.types import FinishReason, GroupColumns, GroupSummary
from rollout.weights.fingerprint_sums import difference
from rollout.weights.manifest import Box
from tests.rollout.conftest import engine_environment
from tests.rollout.engine.test_engine_updates import Corrupting, start_senders
from tests.rollout.worker.test_publish import gap
from tests.support.engines.live import Live
from tests.support.engines.packing import RUN_ID, pack
from tests.support.engines.weight_faults import FAULTS, LAYER, Tensors, meant, stale

pytestmark = [pytest.mark.slow, pytest.mark.long]


def spec(directory: str, *, engine_id: int, load: bool) -> EngineSpec:
    config = EngineConfig(
        tensor_parallel=2,
        format="int8",
        bf16_first_layers=0,
        bf16_last_layers=0,
        kv_cache_bytes=32 << 20,
        max_num_seqs=16,
        update_timeout_s=60,
    )
    return EngineSpec(
        engine_id=engine_id,
        run_id=RUN_ID,
        config=config,
        directory=directory,
        max_model_len=256,
        load_from_directory=load,
    )


@dataclass(frozen=True)
class Loaded:
    """Answers of a two-rank engine that loaded weights B, before and when its core process was killed."""

    state: EngineState
    answers: dict[str, list]
    late_answers: str
    """What a call returned after a rank had raised in the call before."""
    cut_off: tuple[GroupSummary, GroupColumns]
    """A group whose engine was killed while it sampled."""
    undisturbed: GroupColumns
    """The group of the same seeds that was sampled before."""
    fault: str
    """What the engine says of itself afterwards."""
    vllm_waits: bool
    """Whether a call of vLLM's own was still waiting when ours had raised."""


@pytest.fixture(scope="module")
def loaded(checkpoints, loop) -> Loaded:
    engine = Engine(spec(str(checkpoints.path("qwen3", "B", "int8")), engine_id=5, load=True))
    with engine_environment():
        loop.run(engine.start())
    live = Live(engine, loop, checkpoints, "int8")
    found = Loaded(engine.state(), loop.run(live.greedy()), loop.run(_raised(engine)), *loop.run(_killed(live)))
    engine.shutdown()
    return found


async def _raised(engine: Engine) -> str:
    with pytest.raises(Exception, match="Worker failed"):
        await engine._llm.collective_rpc("expect_weights", args=(b"no pickle",))
    try:
        return str(await engine._llm.collective_rpc("drain_trace"))
    except Exception as error:
        return str(error)


async def _begun(live: Live, seeds: Sequence[int]) -> asyncio.Task[tuple[GroupSummary, GroupColumns]]:
    """A group whose responses start together, so that its batches are those of every group of these seeds."""
    await live.engine.hold()
    group = live.group(seeds=seeds, max_response_tokens=200)
    job = asyncio.create_task(live.engine.generate_group(group))
    await live.engine.release([group.group_id])
    return job


async def _killed(live: Live) -> tuple[tuple[GroupSummary, GroupColumns], GroupColumns, str, bool]:
    assert live.engine.fault() == ""
    tried, _ = await (await _begun(live, range(16)))
    seeds = [int(seed) for seed in np.argsort(tried.lengths)[-4:]]  # the others may stop before the engine is killed
    _, undisturbed = await (await _begun(live, seeds))
    job = await _begun(live, seeds)
    await live.until_emitted(20)
    client = live.engine._llm.engine_core
    (core,) = client.resources.engine_manager.processes
    os.kill(core.pid, signal.SIGSTOP)  # so that it does not answer
    of_vllm = asyncio.create_task(type(client).call_utility_async(client, "is_sleeping"))
    ours = asyncio.create_task(client.call_utility_async("is_sleeping"))
    await asyncio.sleep(0.1)
    assert not of_vllm.done() and not ours.done()
    os.kill(core.pid, signal.SIGKILL)
    cut_off = await job
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(ours, 20)
    waits = not of_vllm.done()
    of_vllm.cancel()
    return cut_off, undisturbed, live.engine.fault(), waits


@pytest.fixture(scope="module")
def parallel(loaded, checkpoints, loop):
    directory = str(checkpoints.path("qwen3", "A", "int8"))
    live = Live(Engine(spec(directory, engine_id=6, load=False)), loop, checkpoints, "int8")
    with engine_environment():
        loop.run(live.engine.start())
    yield live
    live.close()


def assert_serves(live, loop, expected) -> None:
    answers = loop.run(live.greedy())
    assert answers["tokens"] == expected["tokens"]
    assert gap(answers["logprobs"], expected["logprobs"]) < 1e-6
    assert gap([answers["probe"]], [expected["probe"]]) < 1e-6


def test_an_engine_that_loads_a_directory_serves_it_as_version_0(loaded):
    assert loaded.state.status is EngineStatus.SERVING and loaded.state.weight_version == 0


def test_each_rank_requires_its_slice_of_cut_tensors_and_all_of_the_others(parallel):
    """Rank 1 of two; the tiny Qwen3 has four query and two key/value heads of 32, hidden 128, ffn 256."""
    layer = "model.layers.1."
    expected = {
        "model.embed_tokens.weight": ((128, 0), (128, 128)),
        "lm_head.weight": ((128, 0), (128, 128)),
        layer + "self_attn.q_proj.weight": ((64, 0), (64, 128)),
        layer + "self_attn.q_proj.weight_scale": ((64, 0), (64, 1)),
        layer + "self_attn.v_proj.weight": ((32, 0), (32, 128)),
        layer + "self_attn.o_proj.weight": ((0, 64), (128, 64)),
        layer + "self_attn.o_proj.weight_scale": ((0, 0), (128, 1)),
        layer + "mlp.up_proj.weight": ((128, 0), (128, 128)),
        layer + "mlp.down_proj.weight": ((0, 128), (128, 128)),
        layer + "input_layernorm.weight": ((0,), (128,)),
        layer + "self_attn.q_norm.weight": ((0,), (32,)),
    }
    (_, required) = parallel.engine.weights.required
    for name, (start, shape) in expected.items():
        assert required[name] == (Box(start=start, shape=shape),), name


def test_two_ranks_answer_alike_with_pushed_and_with_loaded_weights(parallel, loop, loaded):
    loop.run(parallel.use_shm())
    loop.run(parallel.push("A"))
    assert loop.run(parallel.greedy())["tokens"] != loaded.answers["tokens"]
    loop.run(parallel.push("B"))
    assert_serves(parallel, loop, loaded.answers)


def fingerprint_after(live: Live, loop, tensors: Tensors) -> dict[str, np.ndarray]:
    """Fingerprint of the engine that has applied these tensors and does not serve yet, as taken while it loaded them.

    It equals that of a second pass over the loaded weights, to the bit.
    """
    version = live.engine.state().weight_version + 1
    publish = pack(tensors, version, "int8", num_ranks=2, required=live.engine.weights.required)
    loop.run(live.engine.weights.update(publish.manifest, live.stage(publish)))
    sums, again = live.engine.weights.sums, loop.run(live.engine.weights.loaded_fingerprint())
    assert sums.keys() == again.keys() and all(np.array_equal(sums[name], again[name]) for name in sums)
    return sums


def test_the_fingerprint_of_both_ranks_equals_that_of_the_checkpoint_but_for_rounding(parallel, loop):
    loop.run(parallel.use_shm())
    for weights in "AB":
        tensors = parallel.tensors(weights)
        gap, where = difference(fingerprint_after(parallel, loop, tensors), meant(tensors))
        assert gap < MAX_WEIGHT_GAP / 3, where


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_weights_have_another_fingerprint(parallel, loop, name):
    tensor, fault = FAULTS[name]
    loop.run(parallel.use_shm())
    tensors = parallel.tensors("A")
    gap, where = difference(fingerprint_after(parallel, loop, fault(tensors)), meant(tensors))
    assert gap > 2 * MAX_WEIGHT_GAP
    assert re.search(tensor, where), where


def test_a_stale_layer_changes_the_fingerprint(parallel, loop):
    loop.run(parallel.use_shm())
    tensors = parallel.tensors("A")
    gap, where = difference(fingerprint_after(parallel, loop, stale(tensors, parallel.tensors("B"))), meant(tensors))
    assert gap > 2 * MAX_WEIGHT_GAP and LAYER in where
    loop.run(parallel.push("A"))
    with pytest.raises(RuntimeError, match="engine 6 is serving"):
        loop.run(parallel.engine.weights.loaded_fingerprint())


def test_gloo_reaches_both_ranks_and_a_failure_fences_both(parallel, loop, loaded):
    senders, store = loop.run(parallel.use_gloo())
    publish = parallel.publish("B")
    start_senders(publish, senders)
    loop.run(parallel.engine.weights.update(publish.manifest))
    loop.run(parallel.engine.weights.resume())
    assert_serves(parallel, loop, loaded.answers)

    broken = parallel.publish("A")
    index = broken.manifest.buckets[-1].index
    start_senders(broken, [Corrupting(sender, index) for sender in senders])
    with pytest.raises(EngineFencedError, match=f"engine 6 is fenced: .*bucket {index}"):
        loop.run(parallel.engine.weights.update(broken.manifest))
    loop.run(parallel.use_shm())
    loop.run(parallel.push("B"))
    assert_serves(parallel, loop, loaded.answers)
    del store


def test_vllm_still_mixes_up_late_answers_of_a_failed_call_with_the_next_call(loaded):
    """If this fails, `Worker.answer` is no longer needed."""
    assert "Worker failed with error" in loaded.late_answers


def test_vllm_still_waits_for_the_answer_of_a_dead_engine(loaded):
    """If this fails, `vllm_quirks.calls_wait_forever_for_a_dead_engine` is no longer needed."""
    assert loaded.vllm_waits


def test_a_dead_engine_reports_its_death_and_returns_the_sampled_tokens(loaded):
    summary, columns = loaded.cut_off
    assert summary.fault.startswith("engine 5: ") and loaded.fault == "engine 5: vLLM's process has ended"
    assert summary.finish_reasons == (FinishReason.ABORT,) * 4 and summary.is_unfinished
    assert all(0 < length < 200 for length in summary.lengths)
    assert columns.offsets[-1] == sum(summary.lengths) == len(columns.response_ids) == len(columns.rollout_logprobs)
    assert (columns.rollout_logprobs <= 0).all()
    assert [sum(span.num_tokens for span in spans) for spans in summary.weight_spans] == list(summary.lengths)


def test_a_dead_engines_tokens_are_the_beginnings_of_what_each_seed_samples_undisturbed(loaded):
    _, columns = loaded.cut_off
    assert len({tuple(loaded.undisturbed.response(sample)[:20]) for sample in range(4)}) == 4
    for sample in range(4):
        count = len(columns.response(sample))
        assert columns.response(sample).tolist() == loaded.undisturbed.response(sample)[:count].tolist()
        assert gap([columns.logprobs(sample)], [loaded.undisturbed.logprobs(sample)[:count]]) < 1e-6
        assert columns.resampled_in(sample).tolist() == loaded.undisturbed.resampled_in(sample)[:count].tolist()
