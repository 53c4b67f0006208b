"""The cost surface is learned from noisy, outlying and partial observations, and never gets stuck."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.drafting.draft_length import choose_draft_lengths
from history.drafting.forward_cost import ForwardCostModel

MACHINES = {
    "memory-bound to 256": lambda b, n, c: 0.010 + 2e-6 * b + 4e-5 * max(n - 256, 0) + 2.7e-8 * c,
    "compute-bound from 8": lambda b, n, c: 0.018 + 9e-4 * max(n - 8, 0) + 1e-4 * b,
    "dear drafts": lambda b, n, c: 0.02 + 2e-4 * n + 0.004 * (n > b),
}


def feed(surface: ForwardCostModel, machine, forwards, rng: np.random.Generator, noise: float = 0.03) -> None:
    for b, n, c in forwards:
        seconds = machine(b, n, c) * rng.lognormal(0, noise)
        surface.observe(num_rows=b, num_tokens=n, num_context_tokens=c, seconds=seconds)


def draft_prices(surface: ForwardCostModel, num_rows: int, max_tokens: int, context: int = 0) -> np.ndarray:
    """Draft prices, after the plain forwards that the surface may ask for."""
    for _ in range(5):
        prices = surface.seconds_by_tokens(num_rows, max_tokens, context)
    return prices


def a_rollout(rng: np.random.Generator, num: int = 1200) -> list[tuple[int, int, int]]:
    """Forwards of a batch that shrinks, a third of them without drafts."""
    found = []
    for i in range(num):
        b = max(1, int(64 * (1 - i / num)))
        n = b + (int(rng.integers(1, 8 * b)) if i % 3 else 0)
        found.append((b, n, b * (500 + i)))
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_the_surface_is_learned_within_a_tenth(name: str) -> None:
    rng = np.random.default_rng(1)
    surface, machine = ForwardCostModel(), MACHINES[name]
    feed(surface, machine, a_rollout(rng), rng)
    for b, n, c in [(1, 1, 1600), (1, 8, 1600), (8, 8, 12_000), (8, 40, 12_000), (32, 32, 32_000), (32, 150, 32_000)]:
        assert surface.seconds(b, n, c) == pytest.approx(machine(b, n, c), rel=0.1), (b, n, c)


def test_plain_forwards_of_large_batches_price_the_drafts_of_small_ones() -> None:
    rng = np.random.default_rng(2)
    surface, machine = ForwardCostModel(), MACHINES["compute-bound from 8"]
    feed(surface, machine, [(b, b, 0) for b in range(64, 3, -1) for _ in range(8)], rng)
    ratio = surface.seconds(4, 48) / surface.seconds(4, 4)
    assert ratio == pytest.approx(machine(4, 48, 0) / machine(4, 4, 0), rel=0.15)


@pytest.mark.parametrize("position", [0, 1, 5, 30, 200])
def test_outliers_do_not_distort_the_surface(position: int) -> None:
    rng = np.random.default_rng(3)
    surface, machine = ForwardCostModel(), MACHINES["compute-bound from 8"]
    forwards = a_rollout(rng, 400)
    feed(surface, machine, forwards[:position], rng)
    surface.observe(num_rows=64, num_tokens=100, num_context_tokens=0, seconds=45.0)
    feed(surface, machine, forwards[position:], rng)
    for b, n in [(16, 16), (16, 60), (64, 100)]:
        assert surface.seconds(b, n) == pytest.approx(machine(b, n, 0), rel=0.12)


def test_the_surface_follows_a_change_of_machine_speed() -> None:
    rng = np.random.default_rng(4)
    surface = ForwardCostModel()
    feed(surface, lambda b, n, c: 0.02 + 1e-5 * n, [(8, 8 + 4 * (i % 3), 0) for i in range(600)], rng)
    feed(surface, lambda b, n, c: 0.04 + 1e-3 * n, [(8, 8 + 4 * (i % 3), 0) for i in range(3000)], rng)
    assert surface.seconds(8, 8) == pytest.approx(0.048, rel=0.1)
    assert surface.seconds(8, 16) == pytest.approx(0.056, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_prices_never_fall_with_the_number_of_tokens(data: st.DataObject) -> None:
    surface = ForwardCostModel(verify_sizes=data.draw(st.sampled_from([(), (8, 16, 64, 256)])))
    numbers = st.integers(1, 300)
    for _ in range(data.draw(st.integers(0, 60))):
        b = data.draw(numbers)
        n = b + data.draw(st.integers(0, 300))
        seconds = data.draw(st.floats(1e-4, 100))
        surface.observe(num_rows=b, num_tokens=n, num_context_tokens=data.draw(numbers), seconds=seconds)
    b = data.draw(numbers)
    prices = draft_prices(surface, b, b + 400, 10)
    finite = prices[np.isfinite(prices)]
    assert len(prices) == 401 and len(finite) >= 1 and (finite > 0).all() and (np.diff(finite) >= 0).all()
    assert prices[0] == surface.seconds(b, b, 10)
    sober = [surface.seconds(b, b + extra, 10) for extra in range(len(finite))]
    assert (finite <= np.array(sober) * (1 + 1e-9)).all()


def test_the_price_of_drafting_is_the_estimate_after_the_first_drafts() -> None:
    rng = np.random.default_rng(5)
    surface, machine = ForwardCostModel(), MACHINES["dear drafts"]
    feed(surface, machine, a_rollout(rng, 600), rng)
    prices = draft_prices(surface, 8, 40)
    np.testing.assert_allclose(prices, [surface.seconds(8, n) for n in range(8, 41)])


def test_a_plain_forward_is_requested_before_the_first_drafts_and_occasionally_later() -> None:
    surface = ForwardCostModel()
    asked = 0
    for _ in range(3000):
        plain = not np.isfinite(surface.seconds_by_tokens(4, 8)[1])
        asked += plain
        surface.observe(num_rows=4, num_tokens=4 if plain else 8, num_context_tokens=0, seconds=0.02)
    assert 4 <= asked <= 20


def test_padded_sizes_are_steps() -> None:
    surface = ForwardCostModel(verify_sizes=(8, 16, 32))
    prices = draft_prices(surface, 4, 20)
    # 4..8 tokens cost the same but for the first draft's surcharge, so do 9..16
    assert np.unique(prices[1:5]).size == 1
    assert np.unique(prices[5:13]).size == 1
    assert prices[5] > prices[4]


@pytest.mark.parametrize("name", MACHINES)
def test_drafting_by_learned_prices_is_nearly_as_fast_as_by_true_prices(name: str) -> None:
    """A whole loop without initial observations: every observation comes from chosen lengths."""
    rng = np.random.default_rng(6)
    machine, surface = MACHINES[name], ForwardCostModel()
    for b in (64, 8, 1):
        totals = {"learned": [0.0, 0.0], "true": [0.0, 0.0], "nothing": [0.0, 0.0]}
        for i in range(300):
            table = np.cumprod(rng.uniform(0.6, 1, (b, 16)), axis=1).astype(np.float32)
            context, full, ones = b * (300 + i), np.full(b, 16, dtype=np.int32), np.ones(b)
            true = np.array([machine(b, n, context) for n in range(b, 17 * b + 1)])
            learned = choose_draft_lengths(table, full, ones, surface.seconds_by_tokens(b, 17 * b, context))
            choices = {"learned": learned, "true": choose_draft_lengths(table, full, ones, true), "nothing": 0 * full}
            for kind, lengths in choices.items():
                totals[kind][0] += b + sum(float(row[:n].sum()) for row, n in zip(table, lengths, strict=True))
                totals[kind][1] += true[lengths.sum()]
            n = b + int(learned.sum())
            seconds = true[n - b] * rng.lognormal(0, 0.03)
            surface.observe(num_rows=b, num_tokens=n, num_context_tokens=context, seconds=seconds)
        rates = {kind: emitted / seconds for kind, (emitted, seconds) in totals.items()}
        assert rates["learned"] >= 0.95 * rates["true"], (b, rates)
        assert rates["learned"] >= 0.985 * rates["nothing"], (b, rates)
    assert 0 < surface.num_explored < 60


def test_drafting_resumes_when_it_begins_to_pay() -> None:
    """Drafts are expensive at first and then free."""
    rng = np.random.default_rng(7)
    surface = ForwardCostModel()
    table = np.full((4, 8), 0.9, dtype=np.float32) ** np.arange(1, 9, dtype=np.float32)
    drafted = []
    for i in range(6000):
        prices = surface.seconds_by_tokens(4, 36)
        n = 4 + int(choose_draft_lengths(table, np.full(4, 8, dtype=np.int32), np.ones(4), prices).sum())
        seconds = (0.02 if i > 800 else 0.02 * n / 4) * rng.lognormal(0, 0.02)
        surface.observe(num_rows=4, num_tokens=n, num_context_tokens=0, seconds=seconds)
        drafted.append(n > 4)
    assert sum(drafted[400:800]) < 20
    assert np.mean(drafted[-500:]) > 0.9


def test_a_table_serves_as_prior_and_a_surface_is_saved_as_a_table(tmp_path: Path) -> None:
    machine = MACHINES["compute-bound from 8"]
    sizes = [(b, n, b * 100) for b in (1, 8, 64) for n in (1, 8, 16, 64, 128, 512) if n >= b]
    fields = ("num_rows", "num_tokens", "num_context_tokens", "seconds")
    rows = [dict(zip(fields, (*size, machine(*size)), strict=True)) | {"model": "small"} for size in sizes]
    other = {**rows[0], "model": "large", "seconds": 9.0}
    path = tmp_path / "step_time.json"
    path.write_text(json.dumps({"rows": [*rows, other]}))
    surface = ForwardCostModel.load(path, only={"model": "small"})
    for b, n, c in sizes:
        assert surface.seconds(b, n, c) == pytest.approx(machine(b, n, c), rel=0.1)
    assert np.isfinite(draft_prices(surface, 8, 512)).all()
    surface.save(tmp_path / "learned.json")
    again = ForwardCostModel.load(tmp_path / "learned.json")
    for b, n, c in sizes:
        assert again.seconds(b, n, c) == pytest.approx(surface.seconds(b, n, c), rel=0.05)


def test_a_bad_table_and_a_bad_forward_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"rows": [{"model": "7B"}]}')
    with pytest.raises(ValueError, match=r"x\.json.*32B"):
        ForwardCostModel.load(path, only={"model": "32B"})
    path.write_text("[1]")
    with pytest.raises(ValueError, match="step_time"):
        ForwardCostModel.load(path)
    with pytest.raises(ValueError, match="num_rows"):
        ForwardCostModel().observe(num_rows=4, num_tokens=3, num_context_tokens=0, seconds=0.1)


def test_no_forward_is_ever_free() -> None:
    """Costs proportional to tokens leave no fixed cost; a single row was never observed."""
    surface = ForwardCostModel()
    for i in range(500):
        n = 64 + 32 * (i % 8)
        surface.observe(num_rows=64, num_tokens=n, num_context_tokens=0, seconds=1e-4 * max(n - 40, 0))
    assert 0 < surface.seconds(1, 1) < surface.seconds(64, 64)
    surface.observe(num_rows=1, num_tokens=1, num_context_tokens=0, seconds=0.01)
    assert np.isfinite(surface.seconds(1, 1))
