"""Publishes to a running engine: refusals, fences, recovery, and the weight version of every token."""

import asyncio
import dataclasses
import pickle
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rollout.engine import weights as engine_weights
from rollout.engine.state import EngineFencedError, EngineStatus, WeightsRefusedError
from rollout.types import FinishReason, WeightSpan
from rollout.weights.announcement import SentPlan
from rollout.weights.manifest import TensorSpec
from tests.rollout.engine.test_engine import PROMPT, teacher_forced
from tests.rollout.worker.test_publish import gap
from tests.support.engines.live import send_in_thread
from tests.support.engines.packing import Publish


def with_manifest(publish: Publish, **changes: object) -> Publish:
    return Publish(dataclasses.replace(publish.manifest, **changes), publish.payloads)


def without_tensor(live, name: str) -> Publish:
    from tests.support.engines.packing import pack

    tensors = live.tensors("B")
    del tensors[name]
    return pack(tensors, live.engine.state().weight_version + 1, "bf16", num_ranks=2)


def with_norm(live, **spec: object) -> Publish:
    publish = live.publish("B")
    tensors = tuple(dataclasses.replace(t, **spec) if t.name == NORM else t for t in publish.manifest.tensors)
    return with_manifest(publish, tensors=tensors)


NORM = "model.layers.0.input_layernorm.weight"

REFUSED = {
    "testrun": lambda live: with_manifest(live.publish("B"), run_id="another run"),
    "is stale": lambda live: live.publish("B", version=live.engine.state().weight_version),
    "stale: the engine has": lambda live: live.publish("B", version=-1),
    "in format 'int8'": lambda live: with_manifest(live.publish("B"), format="int8"),
    f"{NORM} is missing": lambda live: without_tensor(live, NORM),
    "surplus is unknown": lambda live: with_norm(live, name="surplus"),
    f"{NORM} is .64. bfloat16, the model needs .128.": lambda live: with_norm(live, shape=(64,)),
    f"{NORM} is .128. float32": lambda live: with_norm(live, dtype="float32"),
    "cover": lambda live: with_manifest(live.publish("B"), buckets=live.publish("B").manifest.buckets[:-1]),
    "named twice": lambda live: with_manifest(
        live.publish("B"),
        tensors=(*live.publish("B").manifest.tensors, TensorSpec(name=NORM, shape=(128,), dtype="bfloat16")),
    ),
}


async def refused_while_sampling(live, publish: Publish, segments: dict[int, str]) -> str:
    """Try an update in the middle of a response; the refused update must change nothing."""
    before = live.engine.state(), live.engine.stats().num_refused
    job = asyncio.create_task(live.sample(seeds=(5,), max_response_tokens=100))
    await live.until_emitted(5)
    with pytest.raises(WeightsRefusedError) as error:
        await live.engine.weights.update(publish.manifest, segments)
    assert (live.engine.state(), live.engine.stats().num_refused - 1) == before
    summary, _ = await job
    assert summary.weight_spans == ((WeightSpan(weight_version=before[0].weight_version, num_tokens=100),),)
    return str(error.value)


def assert_serves(live, loop, oracle, weights: str) -> None:
    answers, expected = loop.run(live.greedy()), oracle.fresh("qwen3", weights, "bf16")
    assert answers["tokens"] == expected["tokens"]
    assert gap(answers["logprobs"], expected["logprobs"]) < 1e-6
    assert gap([answers["probe"]], [expected["probe"]]) < 1e-6


@pytest.fixture
def serving_a(live, loop):
    """The engine serves weights A through shared memory."""
    loop.run(live.use_shm())
    loop.run(live.push("A"))
    return live


@pytest.mark.parametrize("message", REFUSED)
def test_a_manifest_with_a_fault_is_refused_and_the_old_weights_serve_on(serving_a, loop, message):
    publish = REFUSED[message](serving_a)
    error = loop.run(refused_while_sampling(serving_a, publish, serving_a.stage(serving_a.publish("B"))))
    assert "engine 3 refused weight version" in error
    with pytest.raises(WeightsRefusedError, match=message):
        serving_a.engine.weights.check(publish.manifest)


def test_a_corrupt_bucket_in_shared_memory_is_refused_and_the_old_weights_serve_on(serving_a, loop, oracle):
    publish = serving_a.publish("B")
    segments = serving_a.stage(publish)
    with Path(segments[1]).open("r+b") as file:
        file.seek(1000)
        file.write(b"corrupt")
    assert "checksum" in loop.run(refused_while_sampling(serving_a, publish, segments))
    assert_serves(serving_a, loop, oracle, "A")


def test_a_rank_without_shared_memory_file_is_refused_and_named(serving_a, loop, oracle):
    publish = serving_a.publish("B")
    segments = serving_a.stage(publish)
    assert "trainer rank 1" in loop.run(refused_while_sampling(serving_a, publish, {0: segments[0]}))
    assert_serves(serving_a, loop, oracle, "A")


def test_a_running_engine_serves_weights_a_b_and_a_again(serving_a, loop, oracle):
    for weights in "BA":
        loop.run(serving_a.push(weights))
        assert_serves(serving_a, loop, oracle, weights)


def test_an_applied_publish_is_not_served_before_resume(serving_a, loop):
    async def applied():
        publish = serving_a.publish("B")
        await serving_a.engine.weights.update(publish.manifest, serving_a.stage(publish))
        job = asyncio.create_task(serving_a.sample())
        done, _ = await asyncio.wait([job], timeout=0.3)
        assert not done and serving_a.engine.state().status is EngineStatus.APPLYING
        await serving_a.engine.weights.resume()
        return publish.manifest.weight_version, await job

    version, (summary, _) = loop.run(applied())
    assert summary.oldest_version == version


def test_a_failed_probe_fences_the_engine_and_the_next_publish_heals_it(serving_a, loop, oracle):
    async def fenced():
        publish = serving_a.publish("B")
        await serving_a.engine.weights.update(publish.manifest, serving_a.stage(publish))
        await serving_a.engine.weights.fence("probe gap 9 exceeds 0.05")
        job = asyncio.create_task(serving_a.sample())
        done, _ = await asyncio.wait([job], timeout=0.3)
        state = serving_a.engine.state()
        assert not done and state.status is EngineStatus.FENCED and "probe gap 9" in state.fault
        with pytest.raises(RuntimeError, match="cannot be probed: probe gap 9"):
            await serving_a.engine.weights.probe([1, 2, 3])
        with pytest.raises(RuntimeError, match="no update to serve"):
            await serving_a.engine.weights.resume()
        await serving_a.push("A")
        return serving_a.engine.state().weight_version, await job

    version, (summary, _) = loop.run(fenced())
    assert summary.oldest_version == version
    assert_serves(serving_a, loop, oracle, "A")


def test_an_engine_that_starts_over_serves_nothing_until_a_publish_of_any_version(serving_a, loop, oracle):
    live = serving_a
    version = live.engine.state().weight_version
    loop.run(cancelled_group(live))
    loop.run(live.engine.pause_sampling())
    loop.run(live.engine.start_over())
    assert live.engine.stats().num_running == 0
    assert live.engine.state().status is EngineStatus.FENCED and live.engine.state().weight_version == -1
    assert loop.run(live.engine.ended_at_least(0)) == 0
    loop.run(live.push("B"))
    assert version > 0 and live.engine.state().weight_version == 0
    assert_serves(live, loop, oracle, "B")


async def cancelled_group(live) -> None:
    job = asyncio.create_task(live.sample(seeds=(5,), max_response_tokens=100))
    await live.until_emitted(5)
    job.cancel()


async def updated_in_mid_response(live, num_updates: int):
    """Sample long responses while weights change B, A, B, ...; returns the group and vLLM's own version spans."""
    theirs: list[list[tuple[int, int]]] = []
    finish = live.engine._ledger.finish

    def spy(response, output, current):
        found = output.outputs[0].weight_versions
        theirs.append([(int(span.version), span.end - span.start) for span in found])
        return finish(response, output, current)

    live.engine._ledger.finish = spy
    try:
        job = asyncio.create_task(live.sample(seeds=range(4), max_response_tokens=200))
        for number in range(num_updates):
            await live.until_emitted(10 + 15 * number)
            await live.push("BA"[number % 2])
        summary, columns = await job
    finally:
        live.engine._ledger.finish = finish
    return summary, columns, theirs


def test_version_spans_equal_those_that_vllm_reports(serving_a, loop):
    first = serving_a.engine.state().weight_version
    summary, _, theirs = loop.run(updated_in_mid_response(serving_a, 3))
    ours = [[(span.weight_version, span.num_tokens) for span in spans] for spans in summary.weight_spans]
    assert sorted(ours) == sorted(theirs)
    for spans in ours:
        assert sum(count for _, count in spans) == 200
        assert [version for version, _ in spans] == [first, first + 1, first + 2, first + 3]


def test_every_token_was_sampled_from_the_weights_named_by_its_span(serving_a, loop):
    summary, columns, _ = loop.run(updated_in_mid_response(serving_a, 1))
    forced = {}
    for name in "AB":
        loop.run(serving_a.push(name))
        ids = [[*PROMPT, *columns.response(sample).tolist()] for sample in range(4)]
        forced[name] = [loop.run(teacher_forced(serving_a, each, len(PROMPT), 1.0)) for each in ids]
    for sample, (old, new) in enumerate(summary.weight_spans):
        assert old.num_tokens + new.num_tokens == 200
        found, a, b = columns.logprobs(sample), forced["A"][sample], forced["B"][sample]
        before, after = slice(0, old.num_tokens), slice(old.num_tokens, 200)
        assert np.abs(found - a)[before].mean() < 0.02 < 0.3 < np.abs(found - b)[before].mean()
        assert np.abs(found - b)[after].mean() < 0.02 < 0.3 < np.abs(found - a)[after].mean()


# -- responses in flight -------------------------------------------------------------------------------


@contextmanager
def in_flight(live, mode: str):
    """Sets how the engine treats responses in flight; the engine reads the setting at every update."""
    spec = live.engine.weights.spec
    live.engine.weights.spec = dataclasses.replace(spec, in_flight=mode)
    yield
    live.engine.weights.spec = spec


async def published_in_mid_response(live, num_updates: int):
    """Four long responses during publishes of the same weights; returns (times of updates, columns, forwards)."""
    await live.engine.drain_trace()
    times = []
    job = asyncio.create_task(live.sample(seeds=range(4), max_response_tokens=200))
    for number in range(num_updates):
        await live.until_emitted(10 + 15 * number)
        publish = live.publish("A")
        times.append(await live.engine.weights.update(publish.manifest, live.stage(publish)))
        await live.engine.weights.probe(list(range(1, 33)))
        await live.engine.weights.resume()
    _, columns = await job
    return times, columns, await live.engine.drain_trace()


def test_responses_that_keep_their_keys_and_values_are_unchanged_by_a_publish(serving_a, loop):
    with in_flight(serving_a, "keep_kv"):
        _, expected, _ = loop.run(published_in_mid_response(serving_a, 0))
        times, found, forwards = loop.run(published_in_mid_response(serving_a, 3))
    np.testing.assert_array_equal(found.response_ids, expected.response_ids)
    np.testing.assert_array_equal(found.rollout_logprobs, expected.rollout_logprobs)
    assert [(one.num_in_flight, one.num_recomputed_tokens) for one in times] == [(4, 0)] * 3
    assert max(forwards["num_scheduled_tokens"][4:]) == 4  # the prompts may come in several forwards


def test_recomputed_tokens_are_counted(serving_a, loop):
    (times,), _, forwards = loop.run(published_in_mid_response(serving_a, 1))
    assert times.num_in_flight == 4
    assert times.num_recomputed_tokens >= 4 * (len(PROMPT) + 10)
    assert forwards["num_scheduled_tokens"].sum() == 4 * (len(PROMPT) + 199) + times.num_recomputed_tokens - 4


async def greedy_group(live, **group: object):
    """Responses to a prompt of several blocks of keys and values; a response that finds them computes none of them."""
    return await live.sample(prompt=range(3, 203), temperature=0.0, max_response_tokens=4, **group)


def test_kept_prefixes_are_not_shared_with_later_responses(serving_a, loop):
    async def greedy():
        _, columns = await greedy_group(serving_a)
        return columns.rollout_logprobs

    with in_flight(serving_a, "keep_kv"):
        old, again = loop.run(greedy()), loop.run(greedy())
        loop.run(serving_a.push("B"))
        kept = loop.run(greedy())
    loop.run(serving_a.push("B"))
    fresh = loop.run(greedy())
    np.testing.assert_allclose(again, old, atol=0.02)
    np.testing.assert_array_equal(kept, fresh)
    assert np.abs(kept - old).max() > 0.1


async def submitted_before(live, publish: Publish):
    """A group that waits inside vLLM when the update pauses it."""
    await live.engine.pause_sampling()
    job = asyncio.create_task(greedy_group(live, seeds=(0, 1)))
    while len(live.engine._ledger) < 2:
        await asyncio.sleep(0.002)
    await live.engine.weights.update(publish.manifest, live.stage(publish))
    return job


async def submitted_during(live, publish: Publish):
    """A group that comes while the ranks apply the update."""
    jobs, ranks = [], live.engine._handle.ranks

    async def noted(method, *args):
        if method == "apply_weights":
            jobs.append(asyncio.create_task(greedy_group(live, seeds=(0, 1))))
            while len(live.engine._ledger) < 2:
                await asyncio.sleep(0.002)
        return await ranks(method, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live.engine._handle, "ranks", noted)
        await live.engine.weights.update(publish.manifest, live.stage(publish))
    return jobs.pop()


@pytest.mark.parametrize("submitted", [submitted_before, submitted_during])
def test_a_response_without_a_token_at_a_publish_shares_no_kept_prefix(serving_a, loop, submitted):
    async def over_a_publish():
        _, cached = await greedy_group(serving_a)
        publish = serving_a.publish("B")
        job = await submitted(serving_a, publish)
        await serving_a.engine.weights.resume()
        await serving_a.engine.resume_sampling()
        summary, columns = await job
        return cached, summary, columns, publish.manifest.weight_version

    with in_flight(serving_a, "keep_kv"):
        cached, summary, found, version = loop.run(over_a_publish())
    loop.run(serving_a.push("B"))  # it drops all keys and values
    _, fresh = loop.run(greedy_group(serving_a))
    for sample in range(2):
        np.testing.assert_array_equal(found.response(sample), fresh.response(0))
        np.testing.assert_allclose(found.logprobs(sample), fresh.logprobs(0), atol=0.02)
    assert np.abs(fresh.rollout_logprobs - cached.rollout_logprobs).max() > 0.1
    assert summary.weight_spans == ((WeightSpan(weight_version=version, num_tokens=4),),) * 2
    assert serving_a.engine.stats().num_running == 0
    assert not serving_a.engine._llm.output_processor.request_states


@pytest.mark.parametrize("when", ["before the other request", "after the other request"])
def test_a_group_that_is_aborted_while_a_publish_submits_it_again_stays_aborted(serving_a, loop, monkeypatch, when):
    engine, request = serving_a.engine, serving_a.engine._request

    async def aborted(group, *args):
        if when == "before the other request":
            await engine.abort(group.group_id)
        queue = await request(group, *args)
        if when == "after the other request":
            await engine.abort(group.group_id)
        return queue

    async def over_a_publish():
        await engine.pause_sampling()
        job = asyncio.create_task(greedy_group(serving_a, seeds=(0, 1)))
        while len(engine._ledger) < 2:
            await asyncio.sleep(0.002)
        monkeypatch.setattr(engine, "_request", aborted)
        await serving_a.push("B")
        await engine.resume_sampling()
        return await asyncio.wait_for(job, 30)

    with in_flight(serving_a, "keep_kv"):
        summary, _ = loop.run(over_a_publish())
    assert summary.finish_reasons == (FinishReason.ABORT,) * 2 and summary.lengths == (0, 0)
    assert engine.stats().num_running == 0
    assert not engine._llm.output_processor.request_states


def test_a_drained_engine_has_finished_its_requests_and_begins_none(serving_a, loop):
    async def drained():
        version = serving_a.engine.state().weight_version
        job = asyncio.create_task(serving_a.sample(max_response_tokens=200))
        await serving_a.until_emitted(10)
        draining = asyncio.create_task(serving_a.engine.weights.drain())
        while not await serving_a.engine._handle.llm.is_paused():  # vLLM clears caches in a thread first
            await asyncio.sleep(0.002)
        late = asyncio.create_task(serving_a.sample())
        await draining
        (summary, _) = await asyncio.wait_for(job, 1)
        done, _ = await asyncio.wait([late], timeout=0.3)
        assert not done
        stale = serving_a.publish("B", version=version)
        with pytest.raises(WeightsRefusedError):
            await serving_a.engine.weights.update(stale.manifest, serving_a.stage(stale))
        refused, _ = await late  # it goes on under the old weights
        await serving_a.engine.weights.drain()
        later = asyncio.create_task(serving_a.sample())
        await asyncio.sleep(0.1)
        await serving_a.push("B")
        after, _ = await later
        return version, summary, refused, after

    version, summary, refused, after = loop.run(drained())
    assert summary.weight_spans == ((WeightSpan(weight_version=version, num_tokens=200),),)
    assert refused.oldest_version == version
    assert after.oldest_version == version + 1


# -- announced publishes -------------------------------------------------------------------------------


@pytest.fixture
def asked(serving_a, monkeypatch):
    """Calls to the ranks of an engine that serves weights A."""
    calls, ranks = [], serving_a.engine._handle.ranks

    async def noted(method, *args):
        calls.append(method)
        return await ranks(method, *args)

    monkeypatch.setattr(serving_a.engine._handle, "ranks", noted)
    return calls


def test_announced_publishes_of_a_plan_that_the_engine_holds_are_applied(serving_a, asked, loop, oracle):
    weights, sent = serving_a.engine.weights, SentPlan()
    for number, name in enumerate("BAB"):
        publish = serving_a.publish(name)
        announced = sent.announce(publish.manifest)
        weights.accept(announced, None if number else publish.manifest)
        loop.run(weights.update(weights.announced(announced), serving_a.stage(publish)))
        loop.run(weights.resume())
        assert serving_a.engine.state().weight_version == publish.manifest.weight_version
    assert_serves(serving_a, loop, oracle, "B")
    assert asked.count("expect_weights") == 3 and "hold_manifest" not in asked


def test_another_plan_reaches_the_ranks_once(serving_a, asked, loop, oracle):
    for name in "BAB":
        publish = serving_a.publish(name, num_ranks=1)
        loop.run(serving_a.engine.weights.update(publish.manifest, serving_a.stage(publish)))
        loop.run(serving_a.engine.weights.resume())
    assert_serves(serving_a, loop, oracle, "B")
    assert asked.count("expect_weights") == 3 and asked.count("hold_manifest") == 1


def test_a_plan_that_is_not_held_is_refused_by_the_engine_and_by_its_ranks(serving_a, loop):
    from rollout.worker.receiver import UpdateOrder

    weights, publish, sent = serving_a.engine.weights, serving_a.publish("B"), SentPlan()
    before = weights.num_refused
    weights.accept(sent.announce(publish.manifest), publish.manifest)
    stale = SentPlan().announce(publish.manifest)
    with pytest.raises(WeightsRefusedError, match=f"follows plan {stale.plan}, but plan .* is held"):
        weights.accept(stale)
    with pytest.raises(WeightsRefusedError, match="the whole manifest must come first"):
        weights.announced(stale)
    assert weights.num_refused == before + 2
    order = UpdateOrder(announced=stale, segments=serving_a.stage(publish), timeout_s=1.0)
    with pytest.raises(RuntimeError, match=f"follows plan {stale.plan}, but plan .* is held"):
        loop.run(serving_a.engine._handle.ranks("expect_weights", pickle.dumps(order)))


def test_a_plan_is_checked_once_and_a_version_each_time(serving_a, monkeypatch):
    weights, publish = serving_a.engine.weights, serving_a.publish("B")
    weights.check(publish.manifest)
    monkeypatch.setattr(engine_weights, "check_plan", lambda *args: pytest.fail("the plan was checked again"))
    weights.check(publish.manifest)
    with pytest.raises(WeightsRefusedError, match="is stale"):
        weights.check(publish.manifest.of_version(serving_a.engine.state().weight_version))


# -- streaming -----------------------------------------------------------------------------------------


@pytest.fixture
def streaming(serving_a, loop):
    """An engine that serves weights A over a gloo channel; it returns to shared memory afterwards."""
    senders, store = loop.run(serving_a.use_gloo())
    yield serving_a, senders
    del store


def start_senders(publish: Publish, senders, *, only: int | None = None):
    return [send_in_thread(publish, sender, rank, only=only) for rank, sender in enumerate(senders)]


def test_gloo_delivers_the_same_weights(streaming, loop, oracle):
    live, senders = streaming
    for weights in "BAB":
        publish = live.publish(weights)
        threads = start_senders(publish, senders)
        loop.run(live.engine.weights.update(publish.manifest))
        loop.run(live.engine.weights.resume())
        for thread in threads:
            thread.join()
        assert_serves(live, loop, oracle, weights)


def test_a_streaming_engine_samples_until_the_first_bucket_arrives(streaming, loop):
    live, senders = streaming
    publish = live.publish("B")

    async def late():
        job = asyncio.create_task(live.sample(max_response_tokens=200))
        update = asyncio.create_task(live.engine.weights.update(publish.manifest))
        summary, _ = await job  # no bucket has been sent yet
        threads = start_senders(publish, senders)
        await update
        await live.engine.weights.resume()
        return summary, threads

    version = live.engine.state().weight_version
    summary, threads = loop.run(late())
    for thread in threads:
        thread.join()
    assert summary.weight_spans == ((WeightSpan(weight_version=version, num_tokens=200),),)


class Corrupting:
    """A sender that gives one bucket the checksum of another publish."""

    def __init__(self, sender, index: int) -> None:
        self.sender, self.index = sender, index

    def __getattr__(self, name):
        return getattr(self.sender, name)

    def commit(self, index: int) -> None:
        if index == self.index:
            self.sender._version += 1
        self.sender.commit(index)
        if index == self.index:
            self.sender._version -= 1


def test_a_corrupt_first_bucket_is_refused_and_the_channel_closed(streaming, loop, oracle):
    live, senders = streaming
    publish = live.publish("B")
    start_senders(publish, [Corrupting(sender, 0) for sender in senders])
    assert "bucket 0: carries weight version" in loop.run(refused_while_sampling(live, publish, {}))
    assert "there is no channel" in loop.run(refused_while_sampling(live, live.publish("B"), {}))
    assert_serves(live, loop, oracle, "A")


def test_a_corrupt_later_bucket_fences_the_engine_and_a_full_publish_heals_it(streaming, loop, oracle):
    live, senders = streaming
    publish = live.publish("B")
    index = publish.manifest.buckets[-2].index

    async def fenced():
        start_senders(publish, [Corrupting(sender, index) for sender in senders])
        with pytest.raises(EngineFencedError, match=f"engine 3 is fenced: .* bucket {index}: carries weight version"):
            await live.engine.weights.update(publish.manifest)
        job = asyncio.create_task(live.sample())
        done, _ = await asyncio.wait([job], timeout=0.3)
        assert not done and live.engine.state().status is EngineStatus.FENCED
        assert live.engine.state().weight_version == publish.manifest.weight_version - 1
        await live.use_shm()
        await live.push("B")
        return await job

    summary, _ = loop.run(fenced())
    assert summary.oldest_version == publish.manifest.weight_version
    assert_serves(live, loop, oracle, "B")


def test_a_rank_that_is_late_from_the_start_is_refused_and_named(streaming, loop, oracle):
    live, senders = streaming
    publish = live.publish("B")
    start_senders(publish, senders, only=0)
    error = loop.run(refused_while_sampling(live, publish, {}))
    assert "engine rank 0 waited in vain (10 s for a publish) for trainer rank" in error
    assert_serves(live, loop, oracle, "A")


def test_a_rank_that_stops_half_way_fences_the_engine_and_is_named(streaming, loop, oracle):
    live, senders = streaming
    publish = live.publish("B")
    late = next(b.index for b in publish.manifest.buckets if b.source_rank == 1)
    send_in_thread(publish, senders[0], 0)

    async def fenced():
        with pytest.raises(EngineFencedError, match=rf"for trainer rank 1 to send bucket {late} of weight version"):
            await live.engine.weights.update(publish.manifest)
        await live.use_shm()
        await live.push("A")

    loop.run(fenced())
    assert_serves(live, loop, oracle, "A")
