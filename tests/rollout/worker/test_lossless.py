"""Drafts change only speed, not greedy tokens, distributions at a temperature or log-probabilities.

Engines run in a process of their own (`tests.support.engines.drafting_jobs`); the reference is transformers in float32
with the same weights.
"""

import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engines import drafting_jobs as jobs

UNLIKELY = 5.0
"""Standard deviations that no statistic of correct sampling exceeds (one in two million)."""


@dataclass(frozen=True)
class Answers:
    root: Path
    emitted: dict[str, jobs.Emitted]


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_CUDA)])
def answers(background) -> Answers:
    """Answers of engines on this machine's platform; the parameter only selects the machines."""
    root, emitted = background.wait("lossless")
    return Answers(Path(root), pickle.loads(Path(emitted).read_bytes()))


def reference(root: Path, format: str):
    """A checkpoint's model in float32; for INT8, activations are rounded as by the kernels."""
    model = AutoModelForCausalLM.from_pretrained(root / "bf16", dtype=torch.float32)
    if format == "int8":
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                layer.weight.data = rounded(layer.weight.data)
                layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return model


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rounds each row to 8 bits and decodes it."""
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (rows / scale).round() * scale


# -- greedy --------------------------------------------------------------------------------------------


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def gaps(a: jobs.Emitted, b: jobs.Emitted) -> np.ndarray:
    """Differences of log-probabilities up to the first different token, over the requests that both have."""
    ends = [first_difference(x, y) for x, y in zip(a.tokens, b.tokens, strict=False)]
    return np.concatenate(
        [np.abs(np.subtract(x[:end], y[:end])) for x, y, end in zip(a.logprobs, b.logprobs, ends, strict=False)]
    )


@pytest.mark.parametrize("kind", jobs.KINDS, ids=lambda kind: kind.name)
def test_greedy_tokens_equal_those_of_a_baseline_engine(answers, kind):
    stock, small, drafted = (
        answers.emitted[f"greedy-{kind.name}-{name}"] for name in ("stock", "stock-in-small-batches", "drafted")
    )
    assert 0 < drafted.stats.num_accepted < drafted.stats.num_drafted
    assert drafted.stats.num_emitted > 1.5 * drafted.stats.num_rows
    ends = [first_difference(x, y) for x, y in zip(stock.tokens, drafted.tokens, strict=True)]
    differing = [(number, end) for number, end in enumerate(ends) if end is not None]
    assert len(differing) <= (0 if kind.name == "fp32" else 0.01 * len(ends)), differing
    noise, orders = gaps(stock, small).max(), jobs.greedy_orders()
    for number, end in differing:
        text = torch.tensor([orders[number].prompt + stock.tokens[number][:end]])
        with torch.no_grad():
            first, second = reference(answers.root, kind.format)(text).logits[0, -1].log_softmax(-1).topk(2).values
        assert first - second < 3 * noise, f"prompt {number} at token {end}: {first - second} apart, noise {noise}"


@pytest.mark.parametrize("kind", jobs.KINDS, ids=lambda kind: kind.name)
def test_greedy_log_probabilities_equal_those_of_a_baseline_engine(answers, kind):
    stock, small, drafted = (
        answers.emitted[f"greedy-{kind.name}-{name}"] for name in ("stock", "stock-in-small-batches", "drafted")
    )
    noise, found = gaps(stock, small), gaps(stock, drafted)
    assert found.mean() <= 2 * noise.mean() + 1e-6
    assert found.max() <= 2 * noise.max() + 1e-5


# -- sampled -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens of one engine and their reference distributions."""

    tokens: np.ndarray
    """[S, T]"""
    logprobs: np.ndarray
    """[S, T], as the engine says."""
    probabilities: np.ndarray
    """[S, T, V], float32, of the reference."""

    @property
    def expected_logprobs(self) -> np.ndarray:
        return np.log(np.take_along_axis(self.probabilities, self.tokens[..., None], axis=2)[..., 0])


def sampled(answers: Answers, kind: jobs.Kind, temperature: float, name: str) -> Sampled:
    emitted = answers.emitted[f"sampled-{kind.name}-{temperature}-{name}"]
    tokens = np.array(emitted.tokens)
    prompts = torch.tensor([o.prompt for o in jobs.sampled_orders(temperature, samples=1)])
    model = reference(answers.root, kind.format)
    found = np.empty((*tokens.shape, jobs.VOCABULARY), dtype=np.float32)
    with torch.no_grad():
        for start in range(0, len(tokens), jobs.NUM_PROMPTS):
            rows = slice(start, start + jobs.NUM_PROMPTS)
            # all but the last token of a prompt are the same for all samples
            if start == 0:
                cache = model(prompts[:, :-1], use_cache=True).past_key_values
            inputs = torch.cat([prompts[:, -1:], torch.from_numpy(tokens[rows, :-1])], dim=1)
            logits = model(inputs, past_key_values=cache, use_cache=True).logits
            cache.crop(-inputs.shape[1])
            found[rows] = (logits / temperature).softmax(-1).numpy()
    return Sampled(tokens, np.array(emitted.logprobs), found)


def surprise(expected: np.ndarray, seen: np.ndarray) -> float:
    """Pearson's chi-square of draws from unlike distributions, in standard deviations (Wilson and Hilferty).

    Args:
        expected: [N, B], probability of each bin at each draw.
        seen: [N], the bin drawn.
    """
    num_bins = expected.shape[1]
    excess = np.bincount(seen, minlength=num_bins) - expected.sum(axis=0)
    covariance = np.diag(expected.sum(axis=0)) - expected.T @ expected
    # bins sum to the number of draws, so one of them is redundant
    chi_square = excess[1:] @ np.linalg.solve(covariance[1:, 1:], excess[1:])
    freedom = num_bins - 1
    return float(((chi_square / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom)))


def by_token(probabilities: np.ndarray, tokens: np.ndarray) -> float:
    """Surprise over the 40 most likely tokens; all others share a bin."""
    common = np.argsort(probabilities.sum(axis=0))[::-1][:40]
    bin_of = np.zeros(jobs.VOCABULARY, dtype=np.int64)
    bin_of[common] = np.arange(1, 41)
    expected = probabilities[:, common].astype(np.float64)
    return surprise(np.column_stack([1 - expected.sum(axis=1), expected]), bin_of[tokens])


def by_rank(probabilities: np.ndarray, tokens: np.ndarray) -> float:
    """Surprise over the ranks of the drawn tokens by probability: first, second, .., the rest."""
    edges = np.array([0, 1, 2, 3, 5, 8, 16, 32, 64])
    drawn = np.take_along_axis(probabilities, tokens[:, None], axis=1)
    ranks = (probabilities > drawn).sum(axis=1)
    descending = -np.sort(-probabilities, axis=1)
    expected = np.add.reduceat(descending, edges, axis=1).astype(np.float64)
    return surprise(expected / expected.sum(axis=1, keepdims=True), np.searchsorted(edges, ranks, side="right") - 1)


def surprises(found: Sampled) -> dict[str, float]:
    """Surprise of all sampled tokens, and of those alone that follow no draft or only padding."""
    report = {}
    for part, at in (("all", slice(None)), ("first", slice(0, 1)), ("later", slice(1, None))):
        tokens = found.tokens[:, at].reshape(-1)
        probabilities = found.probabilities[:, at].reshape(len(tokens), -1)
        report[f"{part} by token"] = by_token(probabilities, tokens)
        report[f"{part} by rank"] = by_rank(probabilities, tokens)
    return report


@pytest.mark.parametrize("kind", jobs.SAMPLED_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("temperature", jobs.TEMPERATURES)
def test_sampled_tokens_have_the_same_distribution_with_drafts(answers, kind, temperature):
    found = sampled(answers, kind, temperature, "drafted")
    stats = answers.emitted[f"sampled-{kind.name}-{temperature}-drafted"].stats
    num_tokens = jobs.num_samples(kind, temperature) * jobs.NUM_PROMPTS * jobs.NUM_SAMPLED
    assert found.tokens.size == num_tokens
    assert num_tokens / 12 < stats.num_accepted < stats.num_drafted - num_tokens / 12
    report = surprises(found)
    assert max(report.values()) < UNLIKELY, report


@pytest.mark.parametrize("kind", jobs.SAMPLED_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("temperature", jobs.TEMPERATURES)
def test_a_seed_gives_the_same_response_with_and_without_drafts_but_for_rounding(answers, kind, temperature):
    """Another batch shape rounds the distribution differently, so a random number may select the neighbouring token."""
    stock, drafted = (answers.emitted[f"sampled-{kind.name}-{temperature}-{name}"] for name in ("stock", "drafted"))
    assert drafted.stats.num_accepted > len(drafted.tokens)
    pairs = list(zip(stock.tokens, drafted.tokens, strict=False))
    ends = [first_difference(a, b) for a, b in pairs]
    num_alike = sum(jobs.NUM_SAMPLED if end is None else end for end in ends)
    num_differing = sum(end is not None for end in ends)
    assert num_differing / (num_alike + num_differing) < 0.01, num_differing


@pytest.mark.parametrize("quirk", jobs.QUIRKS)
@pytest.mark.parametrize("answers", ["cpu"], indirect=True)
def test_tokens_that_vllm_samples_have_another_distribution_without_the_workaround(answers, quirk):
    report = surprises(sampled(answers, jobs.KINDS[0], 1.0, f"without-{quirk}"))
    assert max(report.values()) > UNLIKELY, report


@pytest.mark.parametrize("kind", jobs.SAMPLED_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("temperature", jobs.TEMPERATURES)
def test_sampled_log_probabilities_are_as_close_to_teacher_forced_ones_with_drafts(answers, kind, temperature):
    stock, drafted = (sampled(answers, kind, temperature, name) for name in ("stock", "drafted"))
    noise, found = (np.abs(each.logprobs - each.expected_logprobs) for each in (stock, drafted))
    assert found.mean() < 1.1 * noise.mean()
    assert np.quantile(found, 0.999) < 1.2 * np.quantile(noise, 0.999)


# -- the instruments -----------------------------------------------------------------------------------


def test_the_statistic_is_small_for_right_draws_and_large_for_wrong_ones():
    dice = np.random.default_rng(0)
    probabilities = dice.dirichlet(np.full(jobs.VOCABULARY, 0.05), size=3000).astype(np.float32)
    drawn = np.array([dice.choice(jobs.VOCABULARY, p=p / p.sum()) for p in probabilities.astype(np.float64)])
    sharper = probabilities.astype(np.float64) ** 1.2
    wrong = np.array([dice.choice(jobs.VOCABULARY, p=p / p.sum()) for p in sharper])
    assert by_token(probabilities, drawn) < UNLIKELY and by_rank(probabilities, drawn) < UNLIKELY
    assert by_rank(probabilities, wrong) > UNLIKELY
