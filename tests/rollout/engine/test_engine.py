"""One engine: sampling, reports, hold, abort and probe."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from megatron_rl.model.engine_model import check_engine_models
from megatron_rl.model.spec import read_model_spec
from rollout.engine.state import EngineStatus
from rollout.types import FinishReason, WeightSpan
from tests.rollout.conftest import NUM_BLOCKS
from tests.rollout.worker.test_publish import gap
from tests.support.engines.oracle import PROBE

PROMPT = (5, 9, 17, 33)


async def teacher_forced(live, ids: list[int], num_prompt: int, temperature: float) -> np.ndarray:
    """Log-probabilities [tokens] of a response at a temperature, from all logits of one prefill."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=256, detokenize=False)
    async for out in live.engine._llm.generate({"prompt_token_ids": ids}, params, f"forced-{id(ids)}"):
        rows = out.prompt_logprobs
    full = torch.tensor([[row[token].logprob for token in range(256)] for row in rows[num_prompt:]])
    scaled = torch.log_softmax(full / temperature, dim=-1)
    return scaled.gather(1, torch.tensor(ids[num_prompt:])[:, None])[:, 0].numpy()


def test_a_new_engine_holds_requests_until_the_first_publish(live):
    assert live.before_publish_0


def test_an_engine_reports_the_model_that_the_trainer_reads_from_the_same_file(live):
    spec = read_model_spec(Path(live.engine.spec.directory))
    check_engine_models(spec, {3: live.engine.weights.built})
    config = AutoConfig.from_pretrained(live.engine.spec.directory)
    built = live.engine.weights.built
    assert (built.head_dim, built.rms_norm_eps) == (config.head_dim, config.rms_norm_eps)
    assert (built.rope_type, built.rope_theta) == ("default", config.rope_parameters["rope_theta"])
    with pytest.raises(ValueError, match=r"engine 3 .*rope_theta is 10000\.0 in vLLM and 500000\.0 in the trainer"):
        check_engine_models(replace(spec, rope_theta=5e5), {3: built})


def test_greedy_tokens_and_logprobs_equal_a_fresh_engines(live, loop, oracle):
    loop.run(live.push("A"))
    answers, expected = loop.run(live.greedy()), oracle.fresh("qwen3", "A", "bf16")
    assert answers["tokens"] == expected["tokens"]
    assert gap(answers["logprobs"], expected["logprobs"]) < 1e-6


def test_the_probe_equals_the_prompt_log_probabilities(live, loop, oracle):
    loop.run(live.push("A"))
    assert gap([loop.run(live.engine.weights.probe(PROBE))], [oracle.fresh("qwen3", "A", "bf16")["probe"]]) < 1e-6


@pytest.mark.parametrize("in_flight", ["recompute", "keep_kv"])
def test_a_probe_changes_no_response(live, loop, monkeypatch, in_flight):
    """The responses have two blocks each, so all of the cache: the probe writes to a block that one of them has."""
    monkeypatch.setattr(live.engine.weights, "spec", replace(live.engine.weights.spec, in_flight=in_flight))

    async def probed():
        job = asyncio.create_task(live.sample(seeds=range(NUM_BLOCKS // 2), max_response_tokens=220))
        await live.until_emitted(180)
        await live.engine.weights.probe(PROBE)
        return await job

    summary, columns = loop.run(probed())
    assert summary.lengths == (220,) * (NUM_BLOCKS // 2)
    for sample in range(NUM_BLOCKS // 2):
        ids = [*PROMPT, *columns.response(sample).tolist()]
        forced = loop.run(teacher_forced(live, ids, len(PROMPT), 1.0))
        assert gap([columns.logprobs(sample)[180:]], [forced[180:]]) < 0.05


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_rollout_logprobs_are_those_of_the_sampling_temperature(live, loop, temperature):
    _, columns = loop.run(live.sample(seeds=range(4), temperature=temperature, max_response_tokens=60))
    for sample in range(4):
        ids = [*PROMPT, *columns.response(sample).tolist()]
        expected = loop.run(teacher_forced(live, ids, len(PROMPT), temperature))
        difference = np.abs(columns.logprobs(sample) - expected)
        assert difference.mean() < 0.02 and difference.max() < 0.25


def test_the_temperature_changes_log_probabilities(live, loop):
    _, columns = loop.run(live.sample(seeds=range(4), temperature=0.6, max_response_tokens=60))
    ids = [*PROMPT, *columns.response(0).tolist()]
    at_one = loop.run(teacher_forced(live, ids, len(PROMPT), 1.0))
    assert np.abs(columns.logprobs(0) - at_one).mean() > 0.2


def test_equal_seeds_give_equal_responses_and_other_seeds_do_not(live, loop):
    _, first = loop.run(live.sample(seeds=(7, 7, 8)))
    _, again = loop.run(live.sample(seeds=(7, 7, 8)))
    assert first.response_ids.tolist() == again.response_ids.tolist()
    assert first.response(0).tolist() == first.response(1).tolist() != first.response(2).tolist()


def test_a_long_prompt_is_prefilled_in_chunks_with_a_seed(live, loop):
    prompt = tuple(range(20, 170))
    summary, columns = loop.run(live.sample(seeds=(3, 3), prompt=prompt, max_response_tokens=40))
    assert summary.lengths == (40, 40)
    assert columns.response(0).tolist() == columns.response(1).tolist()


def test_a_probe_longer_than_a_forward_is_refused_and_the_engine_keeps_serving(live, loop):
    with pytest.raises(RuntimeError, match=r"engine 3 could not probe: .*probe of 65 tokens is longer .*64 tokens"):
        loop.run(live.engine.weights.probe(list(range(65))))
    assert loop.run(live.sample())[0].lengths == (20,)


def test_columns_are_read_only_and_have_consistent_lengths(live, loop):
    summary, columns = loop.run(live.sample(seeds=(1, 2, 3), max_response_tokens=17))
    assert summary.lengths == (17, 17, 17) and columns.offsets.tolist() == [0, 17, 34, 51]
    assert summary.engine_id == 3 and summary.num_prompt_tokens == 4
    assert columns.response_ids.dtype == np.int32 and columns.rollout_logprobs.dtype == np.float32
    assert not columns.response_ids.flags.writeable
    assert summary.finished_at_s >= summary.started_at_s


def test_a_stop_token_ends_a_response_and_belongs_to_it(live, loop):
    _, free = loop.run(live.sample(seeds=(11,), max_response_tokens=30))
    stop = int(free.response_ids[7])
    first = free.response_ids.tolist().index(stop)
    summary, columns = loop.run(live.sample(seeds=(11,), max_response_tokens=30, stop_token_ids=(stop,)))
    assert summary.finish_reasons == (FinishReason.STOP,)
    assert columns.response_ids.tolist() == free.response_ids[: first + 1].tolist()
    assert len(columns.rollout_logprobs) == first + 1


def test_a_response_at_its_limit_is_marked_so(live, loop):
    summary, _ = loop.run(live.sample(max_response_tokens=5))
    assert summary.finish_reasons == (FinishReason.LENGTH,) and summary.finish_reasons[0].is_truncated


def test_a_group_that_does_not_fit_is_refused_naming_both_lengths(live, loop):
    with pytest.raises(ValueError, match="prompt of 4 tokens and 253 response tokens exceed max_model_len 256"):
        loop.run(live.sample(max_response_tokens=253))


def test_abort_keeps_the_tokens_sampled_before(live, loop):
    async def aborted():
        group = live.group(seeds=(21,), max_response_tokens=240)
        job = asyncio.create_task(live.engine.generate_group(group))
        await live.until_emitted(5)
        assert await live.engine.abort(group.group_id) == 1
        return await job

    _, whole = loop.run(live.sample(seeds=(21,), max_response_tokens=240))
    summary, columns = loop.run(aborted())
    assert summary.finish_reasons == (FinishReason.ABORT,)
    assert 5 <= summary.lengths[0] < 240
    assert columns.response_ids.tolist() == whole.response_ids[: summary.lengths[0]].tolist()
    assert sum(span.num_tokens for span in summary.weight_spans[0]) == summary.lengths[0]


def test_requests_in_flight_are_reported_by_group_with_tokens_per_response(live, loop):
    async def in_flight_of_a_new_group():
        group = live.group(seeds=(21, 22), max_response_tokens=240)
        job = asyncio.create_task(live.engine.generate_group(group))
        await live.until_emitted(5)
        found = live.engine.in_flight()
        await live.engine.abort(group.group_id)
        return group, found, await job

    group, (found,), (summary, columns) = loop.run(in_flight_of_a_new_group())
    assert (found.group_id, found.num_prompt_tokens) == (group.group_id, len(PROMPT))
    assert len(found.emitted) == 2 and 5 <= max(found.emitted) <= max(summary.lengths)
    had = replace(summary, finish_reasons=(FinishReason.STOP, FinishReason.ABORT))

    async def in_flight_of_the_resumed_group():
        job = asyncio.create_task(live.engine.generate_group(group, had, columns))
        await live.until_emitted(1)
        found = live.engine.in_flight()
        await live.engine.abort(group.group_id)
        await job
        return found

    (found,) = loop.run(in_flight_of_the_resumed_group())
    (emitted,) = found.emitted
    assert emitted > summary.lengths[1]
    assert found.num_context_tokens == len(PROMPT) + emitted
    assert live.engine.in_flight() == []


def test_a_group_begun_on_another_engine_resumes_from_its_tokens(live, loop):
    """One response has finished, one is aborted half-way and one before its first token."""
    seeds = (21, 22, 23)

    async def interrupted(group):
        job = asyncio.create_task(live.engine.generate_group(group))
        await live.until_emitted(5)
        await live.engine.abort(group.group_id)
        return await job

    group = live.group(seeds=seeds, max_response_tokens=40)
    summary, columns = loop.run(interrupted(group))
    cut = [summary.lengths[0], summary.lengths[1], 0]
    offsets = np.cumsum([0, *cut])
    begun = replace(
        columns,
        response_ids=columns.response_ids[: offsets[-1]],
        rollout_logprobs=columns.rollout_logprobs[: offsets[-1]],
        offsets=offsets,
    )
    version = live.engine.state().weight_version
    reasons = (FinishReason.STOP, FinishReason.ABORT, FinishReason.ABORT)
    older = WeightSpan(weight_version=version - 1, num_tokens=3)
    spans = (
        summary.weight_spans[0],
        (older, WeightSpan(weight_version=version, num_tokens=cut[1] - 3)),
        (WeightSpan(weight_version=version - 1, num_tokens=0),),
    )
    had = replace(summary, lengths=tuple(cut), finish_reasons=reasons, weight_spans=spans)
    found, whole = loop.run(live.engine.generate_group(group, had, begun))
    assert found.finish_reasons == (FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH)
    assert found.lengths == (cut[0], 40, 40)
    assert found.weight_spans[1] == (older, WeightSpan(weight_version=version, num_tokens=37))
    assert found.weight_spans[2] == (WeightSpan(weight_version=version, num_tokens=40),)
    for sample in range(3):
        assert whole.response(sample)[: cut[sample]].tolist() == begun.response(sample).tolist()
        assert whole.logprobs(sample)[: cut[sample]].tolist() == begun.logprobs(sample).tolist()
        ids = [*PROMPT, *whole.response(sample).tolist()]
        forced = loop.run(teacher_forced(live, ids, len(PROMPT), 1.0))
        assert gap(whole.logprobs(sample), forced) < 0.05
    again, _ = loop.run(live.engine.generate_group(group, found, whole))
    assert (again.lengths, again.finish_reasons) == (found.lengths, found.finish_reasons)
    assert again.fault == live.engine.fault() == ""


def test_a_cancelled_call_aborts_its_requests(live, loop):
    async def cancelled():
        job = asyncio.create_task(live.sample(seeds=(1, 2), max_response_tokens=200))
        await live.until_emitted(5)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        return live.engine._llm.output_processor.get_num_unfinished_requests()

    assert loop.run(cancelled()) == 0
    assert live.engine.stats().num_running == 0


def test_aborting_a_waiting_group_returns_it_empty(live, loop):
    async def aborted():
        await live.engine._llm.pause_generation(mode="keep", clear_cache=False)
        group = live.group(seeds=(1, 2))
        job = asyncio.create_task(live.engine.generate_group(group))
        while len(live.engine._ledger) < 2:
            await asyncio.sleep(0.01)
        await live.engine.abort(group.group_id)
        await live.engine._llm.resume_generation()
        return await job

    summary, columns = loop.run(aborted())
    assert summary.lengths == (0, 0) and len(columns.response_ids) == 0
    assert summary.oldest_version == live.engine.state().weight_version


def test_a_held_engine_samples_nothing_and_a_resumed_one_samples_the_same_step(live, loop):
    async def step():
        await live.engine.hold()
        groups = [live.group(seeds=(i, i + 50), prompt=(5 + i, 9)) for i in range(5)]
        shuffled = random.sample(groups, len(groups))
        jobs = {g.group_id: asyncio.create_task(live.engine.generate_group(g)) for g in shuffled}
        done, _ = await asyncio.wait(jobs.values(), timeout=0.2)
        assert not done and live.engine.state().held
        await live.engine.release([g.group_id for g in groups])
        return [(await jobs[g.group_id])[1] for g in groups]

    first, again = loop.run(step()), loop.run(step())
    for a, b in zip(first, again, strict=True):
        assert a.response_ids.tobytes() == b.response_ids.tobytes()
        assert a.rollout_logprobs.tobytes() == b.rollout_logprobs.tobytes()


def test_the_trace_counts_every_computed_token_once(live, loop):
    async def traced():
        await live.engine.drain_trace()
        await live.engine.hold()
        group = live.group(seeds=(31, 32), prompt=tuple(range(100, 120)), max_response_tokens=12)
        job = asyncio.create_task(live.engine.generate_group(group))
        await live.engine.release([group.group_id])
        await job
        return await live.engine.drain_trace()

    forwards = loop.run(traced())
    # the second sibling finds no whole block of the prompt in the cache: blocks are longer than the prompt
    assert forwards["num_scheduled_tokens"].tolist() == [40] + [2] * 11
    assert set(forwards["num_running"]) == {2}
    assert forwards["num_context_tokens"].tolist() == [0, *range(40, 62, 2)]
    assert (forwards["seconds"] > 0).all() and (np.diff(forwards["started_at_s"]) > 0).all()
    assert len(loop.run(live.engine.drain_trace())) == 0


def test_stats_count_responses_and_tokens(live, loop):
    before = live.engine.stats()
    loop.run(live.sample(seeds=(1, 2), max_response_tokens=6))
    after = live.engine.stats()
    assert after.num_finished - before.num_finished == 2 and after.num_tokens - before.num_tokens == 12
    assert after.num_running == 0


def test_kernels_are_listed_by_layer(live, loop):
    kernels = loop.run(live.engine.kernel_classes())
    assert kernels["model.layers.1.mlp.down_proj"] == "UnquantizedLinearMethod"


def test_a_serving_engine_refuses_to_resume(live, loop):
    assert live.engine.state().status is EngineStatus.SERVING
    with pytest.raises(RuntimeError, match="engine 3 is serving and has no update to serve"):
        loop.run(live.engine.weights.resume())
