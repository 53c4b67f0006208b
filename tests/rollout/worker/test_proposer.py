"""Rows of vLLM's batch map to rows of the drafter; drafting changes nothing else in an engine."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from history.drafting.stats import DraftStats
from history.types import prompt_key
from megatron_rl.memory import kv_bytes_per_token
from megatron_rl.model.spec import read_model_spec
from rollout.engine.responses import draft_args, sampling_params
from rollout.types import PromptId, SamplingSpec, WeightSpan
from rollout.worker.proposer import HistoryProposer
from tests.rollout.conftest import endless
from tests.support.engines.drafting import LENGTH, PROMPT, Reference, drafting_engine, greedy, remember
from tests.support.engines.oracle import PROBE

K = 4
CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=K),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=12),
    compilation_config=SimpleNamespace(cudagraph_capture_sizes=None),
    additional_config={"drafts": {"max_draft_tokens": K, "segments_dir": ""}},
)
"""As much of vLLM's configuration as is read."""


class Recorder:
    """A drafter that drafts the permitted maximum and records its calls."""

    def __init__(self) -> None:
        self.opened: list[dict[str, int]] = []
        self.closed: list[int] = []
        self.rooms: list[int] = []

    def open(self, **request: int) -> int:
        self.opened.append(request)
        return len(self.opened) - 1

    def close(self, slot: int) -> None:
        self.closed.append(slot)

    def drain(self, *, keeps_requests: bool) -> DraftStats:
        return DraftStats()

    def propose(self, slots, token_ids, num_tokens, rooms):
        assert slots.dtype == np.int64 and len(slots) == len(token_ids) == len(num_tokens) == len(rooms)
        self.rooms = rooms.tolist()
        return [[slot] * room if slot >= 0 else [] for slot, room in zip(slots.tolist(), self.rooms, strict=True)]


class Batch:
    """A proposer bound to a runner whose batch the test arranges."""

    def __init__(self, monkeypatch) -> None:
        rows = SimpleNamespace(req_ids=[], token_ids_cpu=np.zeros((9, 100), dtype=np.int32))
        self.runner = SimpleNamespace(input_batch=rows, requests={}, max_model_len=100)
        self.drafter = Recorder()
        self.num_forwards = 0
        self.proposer = HistoryProposer(CONFIG)
        monkeypatch.setattr(self.proposer, "make_drafter", lambda cost_model: self.drafter)
        self.proposer.bind(self.runner, self.forward_ended)
        self.drafter.__init__()

    def forward_ended(self) -> None:
        self.num_forwards += 1

    def knows(self, name: str, *, prompt: int = 10, limit: int = 50, keyed: bool = True) -> None:
        params = sampling_params(
            SamplingSpec(temperature=1.0, max_response_tokens=limit), 0, (), draft_args(PromptId(name), 7)
        )
        params.extra_args = params.extra_args if keyed else None
        self.runner.requests[name] = SimpleNamespace(num_prompt_tokens=prompt, sampling_params=params)

    def propose(self, **num_tokens: int) -> dict[str, list[int]]:
        """Drafts by request name; 0 tokens mean that the prompt is still being computed."""
        self.runner.input_batch.req_ids = list(num_tokens)
        sampled = [[1] if count else [] for count in num_tokens.values()]
        lengths = np.array([*num_tokens.values(), 99, 99], dtype=np.int32)  # vLLM's arrays are longer than the batch
        drafts = self.proposer.propose(sampled, lengths, self.runner.input_batch.token_ids_cpu)
        return dict(zip(num_tokens, drafts, strict=True))


@pytest.fixture
def batch(monkeypatch) -> Batch:
    return Batch(monkeypatch)


def test_drafts_are_priced_with_the_graph_sizes_of_the_bound_engine(monkeypatch):
    """vLLM changes the sizes after it has made the proposer, when it sizes the KV cache."""
    compilation = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8])
    config = SimpleNamespace(**{**vars(CONFIG), "compilation_config": compilation})
    proposer, models = HistoryProposer(config), []
    compilation.cudagraph_capture_sizes = [5, 10]
    monkeypatch.setattr(proposer, "make_drafter", models.append)
    proposer.bind(SimpleNamespace(max_model_len=100), lambda: None)
    (model,) = models
    assert model.seconds(1, 2) == model.seconds(1, 5) < model.seconds(1, 6) == model.seconds(1, 10)


def test_a_request_keeps_its_draft_row_when_batch_rows_move_and_after_preemption(batch):
    for name in "abc":
        batch.knows(name)
    assert batch.propose(a=20, b=20) == {"a": [0] * K, "b": [1] * K}
    assert batch.propose(b=21, c=20, a=21) == {"b": [1] * 3, "c": [2] * 3, "a": [0] * 3}
    assert batch.propose(c=22) == {"c": [2] * K}
    assert batch.propose(c=23, a=22) == {"c": [2] * K, "a": [0] * K}
    assert [each["prompt_key"] for each in batch.drafter.opened] == [prompt_key(name) for name in "abc"]
    assert batch.num_forwards == 4


def test_a_finished_request_frees_its_draft_row_once(batch):
    batch.knows("a")
    batch.propose(a=20)
    batch.proposer.end({"a", "never sampled"})
    batch.proposer.end({"a"})
    assert batch.drafter.closed == [0]


def test_a_request_in_prefill_is_not_drafted(batch):
    batch.knows("a")
    batch.knows("b")
    assert batch.propose(a=0, b=20) == {"a": [], "b": [1] * K}


def test_a_request_without_a_prompt_key_is_not_drafted(batch):
    batch.knows("probe", keyed=False)
    assert batch.propose(probe=20) == {"probe": []}
    assert batch.drafter.opened == []


@pytest.mark.parametrize(
    ("num_tokens", "room"), [(11, 4), (55, 4), (56, 3), (58, 1), (59, 0), (60, 0)], ids=lambda value: str(value)
)
def test_a_draft_ends_at_the_response_limit(batch, num_tokens, room):
    batch.knows("a", prompt=10, limit=50)
    assert len(batch.propose(a=num_tokens)["a"]) == room
    # a forward emits the accepted tokens and one more
    assert num_tokens + room + 1 <= 60 or room == 0


def test_a_draft_ends_at_the_engines_maximum_length(batch):
    batch.knows("a", prompt=10, limit=500)
    assert batch.propose(a=98)["a"] == [0]
    request = {"prompt_key": prompt_key("a"), "prompt_length": 10, "max_length": 100, "step": 7, "is_counted": True}
    assert batch.drafter.opened[0] == request


def test_drafts_leave_every_row_at_least_one_token_of_the_forward(batch):
    """12 tokens fit a forward."""
    names = "abcdef"
    for name in names:
        batch.knows(name)
    for count, room in ((1, 4), (2, 4), (3, 3), (4, 2), (5, 1), (6, 1)):
        drafts = batch.propose(**dict.fromkeys(names[:count], 20))
        assert {len(draft) for draft in drafts.values()} == {room}
        assert count * (1 + room) <= 12


def test_a_rank_whose_drafts_are_unused_drafts_nothing():
    proposer = HistoryProposer(CONFIG)
    assert proposer.propose([[1], [2]], np.array([5, 5]), np.zeros((2, 9), dtype=np.int32)) == [[], []]
    proposer.end({"a"})
    assert proposer.drain() == DraftStats()


# -- in an engine --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def segments(tmp_path_factory):
    return tmp_path_factory.mktemp("segments")


@pytest.fixture(scope="module")
def drafting(checkpoints, loop, tmp_path_factory, segments):
    directory = endless(checkpoints, tmp_path_factory.mktemp("endless"))
    with drafting_engine(checkpoints, loop, directory, segments) as started:
        yield started


@pytest.fixture(scope="module")
def references(checkpoints) -> dict[str, Reference]:
    return {weights: Reference(checkpoints.path("qwen3", weights, "bf16")) for weights in "AB"}


@pytest.fixture(scope="module")
def tokens_of_a(references) -> list[int]:
    return references["A"].greedy(PROMPT, LENGTH)[0]


@pytest.fixture
def remembering(drafting, segments, loop, references, tokens_of_a):
    """The engine serves weights A; the prompt's history has responses of A and B with an error every 12 tokens."""
    loop.run(drafting.push("A"))
    remember(segments, drafting.engine.state().weight_version, tokens_of_a, references["B"].greedy(PROMPT, LENGTH)[0])
    loop.run(drafting.engine.draft_stats())
    loop.run(drafting.engine.drain_trace())
    return drafting


def test_drafts_save_forwards_and_the_trace_counts_their_tokens(remembering, loop, tokens_of_a):
    _, columns = loop.run(greedy(remembering))
    assert columns.response_ids.tolist() == tokens_of_a
    forwards, stats = loop.run(remembering.engine.drain_trace()), loop.run(remembering.engine.draft_stats())
    assert len(forwards) < LENGTH / 2
    assert stats.num_requests == stats.num_hits == 1
    assert 0 < stats.num_accepted < stats.num_drafted
    # the first token comes from the prompt
    decoding = forwards[1:]
    assert (stats.num_rows, stats.num_emitted) == (len(decoding), LENGTH - 1)
    assert decoding["num_scheduled_tokens"].sum() == len(decoding) + stats.num_drafted
    assert set(decoding["num_running"]) == {1}
    # a forward emits its accepted draft and one token, which was resampled if part of the draft was not accepted
    assert not columns.resampled[0]
    assert 0 < columns.resampled.sum() <= min(len(decoding), stats.num_drafted - stats.num_accepted)
    assert loop.run(remembering.engine.draft_stats()) == DraftStats()


def test_rollout_log_probabilities_equal_teacher_forced_ones(remembering, loop, references):
    _, columns = loop.run(greedy(remembering))
    _, expected = references["A"].greedy(PROMPT, LENGTH)
    assert np.abs(columns.rollout_logprobs - expected).max() < 1e-3


def test_a_publish_in_mid_response_gives_the_same_response_with_drafts(remembering, loop, references):
    """Version spans count several tokens per forward, and keys and values from before the update are not reused."""

    async def updated():
        theirs = []
        finish = remembering.engine._ledger.finish

        def spy(response, output, current):
            theirs.append([(int(s.version), s.end - s.start) for s in output.outputs[0].weight_versions])
            return finish(response, output, current)

        remembering.engine._ledger.finish = spy
        try:
            job = asyncio.create_task(greedy(remembering))
            await remembering.until_emitted(20)
            await remembering.push("B")
            summary, columns = await job
        finally:
            remembering.engine._ledger.finish = finish
        return summary.weight_spans[0], columns, theirs[0]

    spans, columns, theirs = loop.run(updated())
    assert [(span.weight_version, span.num_tokens) for span in spans] == theirs
    old, new = (span.num_tokens for span in spans)
    assert old >= 20 and new > 0 and old + new == LENGTH
    first, first_logprobs = references["A"].greedy(PROMPT, old)
    rest, rest_logprobs = references["B"].greedy((*PROMPT, *first), new)
    assert columns.response_ids.tolist() == first + rest
    assert np.abs(columns.rollout_logprobs - (first_logprobs + rest_logprobs)).max() < 1e-3


def test_abort_keeps_the_tokens_sampled_before(remembering, loop, tokens_of_a):
    async def aborted():
        group = remembering.group(prompt=PROMPT, temperature=0.0, max_response_tokens=240)
        job = asyncio.create_task(remembering.engine.generate_group(group))
        await remembering.until_emitted(20)
        await remembering.engine.abort(group.group_id)
        return await job

    summary, columns = loop.run(aborted())
    (length,) = summary.lengths
    assert 20 <= length < 240
    assert columns.response_ids.tolist()[:LENGTH] == tokens_of_a[:length]
    version = remembering.engine.state().weight_version
    assert summary.weight_spans == ((WeightSpan(weight_version=version, num_tokens=length),),)


def test_an_aborted_response_resumes_from_its_text_in_the_prefix_cache(remembering, loop, tokens_of_a):
    for done in (150, 125, 124):  # a block is 128 tokens
        _, columns = loop.run(greedy(remembering, (*PROMPT, *tokens_of_a[:done]), LENGTH - done))
        assert columns.response_ids.tolist() == tokens_of_a[done:]


def test_a_request_at_the_maximum_length_takes_no_drafts_from_its_neighbour(remembering, loop, tokens_of_a):
    async def both():
        job = asyncio.create_task(greedy(remembering))
        while not job.done():
            await greedy(remembering, prompt=tuple(range(3, 251)), num_tokens=8)
        return (await job)[1].response_ids.tolist()

    loop.run(greedy(remembering))
    alone = len(loop.run(remembering.engine.drain_trace()))
    assert loop.run(both()) == tokens_of_a
    assert len(loop.run(remembering.engine.drain_trace())) < alone + 30


def test_a_probe_is_not_drafted_and_changes_no_response(remembering, loop, references, tokens_of_a):
    async def probed():
        job = asyncio.create_task(greedy(remembering))
        await remembering.until_emitted(20)
        probe = await remembering.engine.weights.probe(PROBE)
        return probe, (await job)[1].response_ids.tolist()

    probe, response = loop.run(probed())
    with torch.no_grad():
        logprobs = references["A"].model(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0].numpy()
    assert np.abs(np.subtract(probe, expected)).max() < 1e-3
    assert response == tokens_of_a
    assert loop.run(remembering.engine.draft_stats()).num_requests == 1


def test_a_baseline_engine_reports_no_drafts(live, loop):
    assert loop.run(live.engine.draft_stats()) == DraftStats()


def test_requests_that_a_full_cache_preempts_are_counted_and_keep_their_tokens(
    checkpoints, loop, tmp_path, references, drafting
):
    prompts = [PROMPT, *([token + shift for token in PROMPT] for shift in (1, 2, 3))]
    blocks = drafting.engine._llm.vllm_config.cache_config
    block_bytes = blocks.block_size * 2 * kv_bytes_per_token(read_model_spec(checkpoints.path("qwen3", "A", "bf16")), 1)

    async def together(live):
        groups = [live.sample(prompt=prompt, temperature=0.0, max_response_tokens=LENGTH) for prompt in prompts]
        return await asyncio.gather(*groups)

    # every request has one block, and at token 129 another one: five fit beside vLLM's own
    with drafting_engine(
        checkpoints, loop, drafting.engine.spec.directory, tmp_path, kv_cache_bytes=6 * block_bytes
    ) as crowded:
        remember(tmp_path, crowded.engine.state().weight_version, references["B"].greedy(PROMPT, LENGTH)[0])
        loop.run(crowded.engine.drain_trace())
        found = loop.run(together(crowded))
        forwards = loop.run(crowded.engine.drain_trace())
    assert 0 < forwards["num_preempted"].sum() <= len(prompts)
    expected = [references["A"].greedy(prompt, LENGTH)[0] for prompt in prompts]
    assert [columns.response_ids.tolist() for _, columns in found] == expected
    loop.run(drafting.engine.drain_trace())
    loop.run(together(drafting))
    assert loop.run(drafting.engine.drain_trace())["num_preempted"].sum() == 0
