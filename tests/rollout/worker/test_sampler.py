"""Tokens follow the model's distribution, with a random number per position; drafts only speed sampling up."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, LogitsProcessors, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from benchmarks.rollout.sampling import draft_metadata, sampling_metadata
from rollout.worker.sampler import draw, emit, install, packed, uniform_numbers, unpacked
from rollout.worker.vllm_compat import RESAMPLED

GREATEST = 1 - 2.0**-53


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    current_platform.import_kernels()


def metadata_of(
    temperatures: list[float],
    *,
    logprobs: int | None = 0,
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    seeds: dict[int, int] | None = None,
    **more: object,
) -> SamplingMetadata:
    greedy = [temperature == 0 for temperature in temperatures]
    return replace(
        sampling_metadata(len(temperatures), "cpu"),
        temperature=None if all(greedy) else torch.tensor(temperatures),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=None if top_p is None else torch.tensor(top_p),
        top_k=None if top_k is None else torch.tensor(top_k, dtype=torch.int32),
        generators={row: torch.Generator().manual_seed(seed) for row, seed in (seeds or {}).items()},
        **({"max_num_logprobs": logprobs} | more),
    )


def every_row(sampling: SamplingMetadata, logits: torch.Tensor, uniforms: list[float] | np.ndarray):
    return draw(
        logits, sampling, rows=torch.arange(len(logits)), uniforms=torch.as_tensor(uniforms, dtype=torch.float64)
    )


# -- numbers ---------------------------------------------------------------------------------------------


def test_random_numbers_are_uniform_and_uncorrelated_with_their_neighbours():
    seeds, places = (x.ravel() for x in np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300)))
    found = uniform_numbers(seeds, places)
    assert found.min() >= 0 and found.max() < 1
    steps = np.arange(1, len(found) + 1) / len(found)
    assert np.abs(np.sort(found) - steps).max() < 1.95 / np.sqrt(len(found))  # Kolmogorov and Smirnov, 0.1 %
    square = found.reshape(300, 300) - 0.5
    for other in (square[:, 1:] * square[:, :-1], square[1:] * square[:-1], square[1:, 1:] * square[:-1, :-1]):
        assert abs(other.mean()) < 4 / 12 / np.sqrt(other.size)


def test_a_random_number_depends_only_on_seed_and_position():
    seeds, places = np.array([7, 2**63 - 1, 7], dtype=np.uint64), np.array([3, 0, 4])
    found = uniform_numbers(seeds, places)
    assert len(set(found)) == 3
    assert uniform_numbers(seeds[1:], places[1:]).tolist() == found[1:].tolist()


# -- draws -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 5, 255, 256, 257, 1000]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 60.0]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    seed=st.integers(0, 2**32),
)
def test_a_token_is_selected_by_inverting_the_cumulative_distribution(vocabulary, spread, temperature, seed):
    dice = np.random.default_rng(seed)
    logits = torch.from_numpy(dice.normal(0, spread, (40, vocabulary)).astype(np.float32))
    uniforms = np.concatenate([dice.random(38), [0.0, GREATEST]])
    tokens, logprobs = every_row(metadata_of([temperature] * 40), logits, uniforms)
    # divided in float32, as logits are: half a unit in the last place of 600 is more than is allowed below
    probabilities = (logits / temperature).double().softmax(-1).numpy()
    ends = probabilities.cumsum(axis=1)
    for row, token in enumerate(tokens.tolist()):
        assert ends[row, token] - probabilities[row, token] - 1e-6 <= uniforms[row] <= ends[row, token] + 1e-6
    expected = np.log(np.take_along_axis(probabilities, tokens.numpy()[:, None], axis=1)[:, 0])
    np.testing.assert_allclose(logprobs.numpy(), expected, rtol=1e-6, atol=2e-5)


def test_rare_tokens_are_drawn_with_the_models_probability():
    """The last tokens lie behind a sum so near to 1 that float32 would lose them or count them twice."""
    probabilities = np.concatenate([[0.5], np.full(300, 1e-8), [0.4], np.full(300, 3e-8)])
    probabilities[0] += 1 - probabilities.sum()
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32)).expand(20_000, -1)
    rare = 300 * 3e-8
    uniforms = 1 - rare * uniform_numbers(np.zeros(20_000, dtype=np.uint64), np.arange(20_000))
    tokens, _ = every_row(metadata_of([1.0] * 20_000), logits, uniforms)
    assert (tokens > 301).float().mean() > 0.99
    seen = np.bincount(tokens.numpy() - 302, minlength=300)[:300]
    assert ((seen - len(tokens) / 300) ** 2).sum() / (len(tokens) / 300) < 300 + 5 * np.sqrt(600)


def test_draws_follow_the_models_distribution():
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(300)
    seen = np.zeros(300)
    for seed in range(3):
        uniforms = uniform_numbers(np.full(20_000, seed, dtype=np.uint64), np.arange(20_000))
        tokens, _ = every_row(metadata_of([0.8] * 20_000), logits.expand(20_000, -1), uniforms)
        seen += np.bincount(tokens.numpy(), minlength=300)
    expected = 60_000 * (logits.double() / 0.8).softmax(0).numpy()
    common = expected > 20
    assert common.sum() > 150
    surplus = ((seen - expected)[common] ** 2 / expected[common]).sum() - common.sum()
    assert abs(surplus) < 5 * np.sqrt(2 * common.sum())


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, GREATEST])
def test_tokens_without_probability_are_never_drawn(uniform):
    logits = torch.full((3, 700), -torch.inf)
    logits[0, 0] = logits[1, 300] = logits[2, 699] = 2.0
    tokens, logprobs = every_row(metadata_of([1.0] * 3), logits, [uniform] * 3)
    assert tokens.tolist() == [0, 300, 699]
    assert logprobs.tolist() == [0, 0, 0]


def test_nan_logits_affect_only_the_log_probability_of_their_row():
    logits = torch.randn(3, 300)
    expected, said = every_row(metadata_of([1.0] * 3), logits, [0.3] * 3)
    logits[1] = torch.nan
    tokens, logprobs = every_row(metadata_of([1.0] * 3), logits, [0.3] * 3)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert 0 <= tokens[1] < 300
    assert torch.equal(tokens[[0, 2]], expected[[0, 2]]) and torch.equal(logprobs[[0, 2]], said[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_top_k_and_top_p_of_each_request_agree_with_vllm(dtype):
    """vLLM draws with other noise, so the test compares log-probabilities of our tokens."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(6, 500)).to(dtype)
    options = {"top_k": [500, 5, 500, 3, 500, 1], "top_p": [1.0, 1.0, 0.6, 0.8, 1.0, 1.0]}
    sampling = metadata_of([1.0, 0.7, 1.3, 1.0, 0.0, 0.4], **options)
    theirs = Sampler("processed_logprobs")(
        logits.clone(), metadata_of([1.0, 0.7, 1.3, 1.0, 0.0, 0.4], logprobs=-1, **options)
    )
    assert theirs.logprobs_tensors is not None
    allowed = theirs.logprobs_tensors.logprobs
    seen = [set() for _ in range(6)]
    before = logits.clone()
    for number in range(60):
        tokens, logprobs = every_row(sampling, logits, np.full(6, (number + 0.5) / 60))
        found = allowed.gather(1, tokens[:, None])[:, 0]
        # a greedy request's log-probability is at temperature 1, without top-k and top-p
        torch.testing.assert_close(logprobs, found, atol=1e-4, rtol=0)
        for row, token in enumerate(tokens.tolist()):
            seen[row].add(token)
    assert seen[4] == {int(logits[4].argmax())} and seen[5] == {int(logits[5].argmax())}
    assert 2 <= len(seen[1]) <= 5 and 2 <= len(seen[3]) <= 3
    assert torch.equal(logits, before)


def test_greedy_requests_need_no_log_probabilities():
    logits = torch.randn(20, 300).bfloat16()
    tokens, logprobs = every_row(metadata_of([0.0] * 20, logprobs=None), logits, np.zeros(20))
    assert tokens.tolist() == logits.argmax(dim=-1).tolist() and logprobs is None
    tokens, logprobs = every_row(metadata_of([0.0] * 20), logits, np.zeros(20))
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1).amax(-1), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_tokens():
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, 151_936)
    uniforms = torch.rand(64, dtype=torch.float64)
    tokens, logprobs = every_row(metadata_of([0.9] * 64), logits, uniforms)
    sampling = metadata_of([0.9] * 64)
    sampling.temperature = sampling.temperature.cuda()
    drawn, said = draw(logits.cuda(), sampling, rows=torch.arange(64).cuda(), uniforms=uniforms.cuda())
    assert (drawn.cpu() == tokens).sum() >= 63  # a number may fall on a border
    torch.testing.assert_close(said.cpu()[drawn.cpu() == tokens], logprobs[drawn.cpu() == tokens], atol=1e-4, rtol=0)


# -- drafts ----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([-1, 0, 1, 2])), max_size=5), min_size=1, max_size=6
    ),
    st.data(),
)
def test_a_draft_is_accepted_up_to_its_first_wrong_token(rows, data):
    drafts = [[draft for _, draft in row] for row in rows]
    drawn = [[*(token for token, _ in row), data.draw(st.integers(0, 2))] for row in rows]
    expected, marked = [], []
    for tokens, draft in zip(drawn, drafts, strict=True):
        kept = 0
        while kept < len(draft) and draft[kept] == tokens[kept]:
            kept += 1
        expected.append(tokens[: kept + 1])
        was_rejected = kept < len(draft) and draft[kept] >= 0  # -1 is padding
        marked += [0] * kept + [RESAMPLED if was_rejected else 0]
    flat = torch.tensor([token for tokens in drawn for token in tokens])
    starts = torch.tensor(np.cumsum([0, *map(len, drawn)])[:-1])
    found = emit(flat, -flat.float(), draft_metadata(drafts), starts)
    most = max(map(len, drafts))
    assert found.sampled_token_ids.tolist() == [tokens + [-1] * (most + 1 - len(tokens)) for tokens in expected]
    assert found.sampled_token_ids.dtype == torch.int32
    assert found.logprobs_tensors is not None
    said = found.logprobs_tensors.filter((found.sampled_token_ids >= 0).flatten())
    assert said.logprob_token_ids[:, 0].tolist() == [token for tokens in expected for token in tokens]
    assert said.logprobs[:, 0].tolist() == [-token for tokens in expected for token in tokens]
    assert said.selected_token_ranks.tolist() == marked


def assert_same_bits(found: SamplerOutput, expected: SamplerOutput) -> None:
    pairs = [(found.sampled_token_ids, expected.sampled_token_ids)]
    assert (found.logprobs_tensors is None) == (expected.logprobs_tensors is None)
    if found.logprobs_tensors is not None:
        pairs += zip(found.logprobs_tensors[:3], expected.logprobs_tensors[:3], strict=True)
    for one, other in pairs:
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()


@pytest.mark.parametrize("logprobs", [[-0.0, float("nan"), -1e-45, float("-inf"), -3.5], None])
def test_one_array_carries_the_bits_of_tokens_log_probabilities_and_ranks(logprobs):
    """The first draft is accepted, the second rejected at its first token; the other two places are empty."""
    said = None if logprobs is None else torch.tensor(logprobs)
    output = emit(torch.tensor([4, 6, 5, 9, 8]), said, draft_metadata([[4], [7, 8]]), torch.tensor([0, 2]))
    assert output.sampled_token_ids.tolist() == [[4, 6, -1], [5, -1, -1]]
    joined = packed(output)
    assert joined.dtype == torch.int32 and joined.shape == (1 if logprobs is None else 3, 6)
    assert_same_bits(unpacked(joined, output.sampled_token_ids.shape), output)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_drafted_tokens_are_on_the_host_and_the_same():
    torch.manual_seed(0)
    logits = torch.randn(5, 40)
    metadata = [draft_metadata([[4], [7, 8]], device) for device in ("cpu", "cuda")]
    sampling = metadata_of([0.9] * 2, seeds={0: 5, 1: 6})
    on_cpu, on_gpu = Rows(sampling), Rows(metadata_of([0.9] * 2, seeds={0: 5, 1: 6}))
    on_gpu.input_batch.sampling_metadata.temperature = sampling.temperature.cuda()
    for rows in (on_cpu, on_gpu):
        rows.input_batch.num_tokens_no_spec = np.array([3, 3], dtype=np.int32)
    expected = on_cpu._sample(logits, metadata[0])
    found = on_gpu._sample(logits.cuda(), metadata[1])
    said, wanted = found.logprobs_tensors, expected.logprobs_tensors
    assert not found.sampled_token_ids.is_cuda and not any(part.is_cuda for part in said[:3])
    assert found.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
    assert said.selected_token_ranks.tolist() == wanted.selected_token_ranks.tolist()
    torch.testing.assert_close(said.logprobs, wanted.logprobs, atol=1e-4, rtol=0)


class Rows:
    """A vLLM runner whose model predicts from the last token alone."""

    def __init__(self, sampling: SamplingMetadata, *, prompt_length: int = 3) -> None:
        torch.manual_seed(1)
        self.table = 2 * torch.randn(40, 40)
        self.texts = [[row] * prompt_length for row in range(len(sampling.output_token_ids))]
        self.logprobs: list[list[float]] = [[] for _ in self.texts]
        self.sampler = SimpleNamespace(logprobs_mode="processed_logprobs")
        self.input_batch = SimpleNamespace(sampling_metadata=sampling, num_reqs=len(self.texts))
        self.left = 0
        install(self)

    def _sample(self, logits, metadata):
        self.left += 1

    def forward(self, drafts: list[list[int]] | None) -> None:
        """One forward with drafts; None: of an engine that has none."""
        self.input_batch.num_tokens_no_spec = np.array([len(text) for text in self.texts], dtype=np.int32)
        before = [[text[-1], *draft] for text, draft in zip(self.texts, drafts or [[]] * len(self.texts), strict=True)]
        logits = self.table[torch.tensor([max(token, 0) for tokens in before for token in tokens])]
        found = self._sample(logits, None if drafts is None else draft_metadata(drafts))
        logprobs = found.logprobs_tensors.logprobs.view(found.sampled_token_ids.shape)
        for row, ids in enumerate(found.sampled_token_ids.tolist()):
            kept = [token for token in ids if token >= 0]
            self.texts[row] += kept
            self.logprobs[row] += logprobs[row, : len(kept)].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_texts_are_the_same_with_and_without_drafts(temperature):
    def rows() -> Rows:
        return Rows(metadata_of([temperature] * 5, seeds={row: 100 + row for row in range(5)}))

    plain, none, drafted = rows(), rows(), rows()
    for _ in range(60):
        plain.forward(None)
        none.forward([[]] * 5)
    dice, num_forwards = np.random.default_rng(0), 0
    while min(map(len, drafted.texts)) < 63:
        drafts = []
        for row, text in enumerate(drafted.texts):
            known = plain.texts[row][len(text) : len(text) + dice.integers(0, 6)]
            drafts.append([int(dice.integers(-1, 40)) if dice.random() < 0.2 else token for token in known])
        drafted.forward(drafts)
        num_forwards += 1
    assert num_forwards < 45
    for row in range(5):
        assert plain.texts[row] == none.texts[row] == drafted.texts[row][:63]
        np.testing.assert_allclose(plain.logprobs[row], drafted.logprobs[row][:60], atol=1e-6)
    assert len({tuple(text[3:]) for text in plain.texts}) == 5


def test_requests_without_a_seed_differ_between_runs():
    first, second = (Rows(metadata_of([1.0] * 4)) for _ in range(2))
    torch.manual_seed(5)
    for _ in range(20):
        first.forward(None)
        second.forward(None)
    assert first.texts != second.texts


class Biased:
    """A user's logits processor."""


@pytest.mark.parametrize(
    "more",
    [
        {"no_penalties": False},
        {"logprobs": 5},
        {"allowed_token_ids_mask": torch.ones(2, 40, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[3]]}},
        {"logprob_token_ids": {0: [3]}},
        {"logitsprocs": LogitsProcessors([SimpleNamespace(is_argmax_invariant=Biased)])},
    ],
    ids=lambda more: next(iter(more)),
)
def test_unsupported_sampling_is_left_to_vllm_and_logged_once(more, caplog):
    rows = Rows(metadata_of([1.0] * 2, **more))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            rows._sample(torch.zeros(2, 40), None)
    assert rows.left == 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("kind", "field", "idle", "busy"),
    [(MinPLogitsProcessor, "min_p_count", 0, 1), (LogitBiasLogitsProcessor, "biases", {}, {0: {3: 1.0}})],
)
def test_a_logits_processor_of_vllm_counts_only_while_a_request_uses_it(kind, field, idle, busy):
    processor = kind.__new__(kind)
    rows = Rows(metadata_of([1.0] * 2, logitsprocs=LogitsProcessors([processor])))
    setattr(processor, field, idle)
    rows.forward(None)
    assert rows.left == 0
    setattr(processor, field, busy)
    rows._sample(torch.zeros(2, 40), None)
    assert rows.left == 1


def test_unprocessed_log_probabilities_are_left_to_vllm():
    rows = Rows(metadata_of([1.0] * 2))
    rows.sampler.logprobs_mode = "raw_logprobs"
    rows._sample(torch.zeros(2, 40), None)
    assert rows.left == 1
