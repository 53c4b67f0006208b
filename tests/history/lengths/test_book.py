import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.lengths.book import KEPT_VISITS, LengthBook, most_bytes
from history.lengths.estimate import OLDER, PRIOR_MEAN, PRIOR_WEIGHT, LengthEstimate

VISITS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 20), st.lists(st.integers(0, 900), min_size=1, max_size=6)), max_size=25
)
GROUP_SIZE = 16


class PlainBook:
    """The same book in lists of Python's integers."""

    def __init__(self) -> None:
        self.visits: dict[int, list[tuple[int, list[int]]]] = {}
        """By key: step and lengths of each visit."""

    def observe(self, key: int, step: int, lengths: list[int]) -> None:
        observed = [length for length in lengths if length]
        visits = self.visits.setdefault(key, []) if observed else [(step, observed)]
        if visits and visits[-1][0] == step:
            visits[-1] = (step, visits[-1][1] + observed)
        else:
            visits.append((step, observed))
        del visits[:-KEPT_VISITS]

    @property
    def prior_mean(self) -> float:
        lengths = [length for visits in self.visits.values() for _, lengths in visits for length in lengths]
        return sum(lengths) / len(lengths) if lengths else PRIOR_MEAN

    def expected(self, key: int) -> float:
        weighted, total = PRIOR_WEIGHT * self.prior_mean, PRIOR_WEIGHT
        for age, (_, lengths) in enumerate(reversed(self.visits.get(key, []))):
            weighted += OLDER**age * sum(lengths)
            total += OLDER**age * len(lengths)
        return weighted / total

    def estimate(self, key: int) -> LengthEstimate:
        pairs = [(step, length) for step, lengths in self.visits.get(key, []) for length in lengths]
        return LengthEstimate.of(
            [length for _, length in pairs], steps=[step for step, _ in pairs], prior_mean=self.prior_mean
        )

    def columns(self) -> dict[str, list[int]]:
        """What a file has, by name of the array."""
        rows = [(key, step, lengths) for key, visits in self.visits.items() for step, lengths in visits]
        return {
            "keys": [key for key, _, _ in rows],
            "steps": [step for _, step, _ in rows],
            "counts": [len(lengths) for _, _, lengths in rows],
            "lengths": [length for _, _, lengths in rows for length in lengths],
        }


def book_of(visits) -> LengthBook:
    book = LengthBook()
    for key, step, lengths in sorted(visits, key=lambda visit: visit[1]):
        book.observe(key, step, lengths)
    return book


def large_book(num_prompts: int, num_visits: int) -> LengthBook:
    book = LengthBook()
    for step in range(1000, 1000 + num_visits):
        for key in range(num_prompts):
            book.observe((1 << 62) + 7 * key, step, range(step + key, step + key + GROUP_SIZE))
    return book


@given(visits=VISITS)
def test_the_expected_length_is_the_mean_of_the_estimate_with_all_lengths_as_prior(visits):
    book = book_of(visits)
    book.check_integrity()
    for key in range(7):
        assert book.expected(key) == pytest.approx(book.estimate(key).mean)


@given(visits=VISITS)
def test_all_numbers_are_bitwise_those_of_a_book_in_lists(visits, tmp_path_factory):
    """Visits come in any order of steps, as from a policy that may take a later group first."""
    path = tmp_path_factory.mktemp("book") / "lengths.npz"
    book, plain, recent = LengthBook(), PlainBook(), []
    for key, step, lengths in visits:
        if any(lengths) and key in plain.visits:
            recent.append((plain.expected(key), float(np.mean([length for length in lengths if length]))))
        book.observe(key, step, lengths)
        plain.observe(key, step, lengths)
    assert (len(book), book.prior_mean, list(book._recent)) == (len(plain.visits), plain.prior_mean, recent)
    book.save(path)
    with np.load(path) as file:
        assert {name: column.tolist() for name, column in file.items()} == plain.columns()
    again = LengthBook()
    again.load(path)
    for key in range(7):
        assert book.expected(key) == again.expected(key) == plain.expected(key)
        assert book.estimate(key) == again.estimate(key) == plain.estimate(key)


@given(visits=VISITS)
def test_a_saved_book_has_bitwise_equal_expectations(visits, tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "lengths.npz"
    book, again = book_of(visits), LengthBook()
    book.save(path)
    again.load(path)
    again.check_integrity()
    assert [again.expected(key) for key in range(7)] == [book.expected(key) for key in range(7)]


@given(visits=VISITS)
def test_files_with_integers_of_64_bits_are_read(visits, tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "lengths.npz"
    book, plain, again = book_of(visits), PlainBook(), LengthBook()
    for key, step, lengths in sorted(visits, key=lambda visit: visit[1]):
        plain.observe(key, step, lengths)
    keys = np.array(plain.columns()["keys"], dtype=np.uint64)
    others = {name: np.array(plain.columns()[name], dtype=np.int64) for name in ("steps", "counts", "lengths")}
    np.savez(path, keys=keys, **others)
    again.load(path)
    again.check_integrity()
    assert [again.estimate(key) for key in range(7)] == [book.estimate(key) for key in range(7)]
    again.observe(3, 30, [5, 6])
    book.observe(3, 30, [5, 6])
    assert again.expected(3) == book.expected(3)


def test_a_loaded_book_has_nothing_of_before(tmp_path: Path):
    path = tmp_path / "lengths.npz"
    book_of([(1, 0, [100, 300])]).save(path)
    book = book_of([(2, step, [7]) for step in range(5)])
    book.load(path)
    book.check_integrity()
    assert (len(book), book.expected(2), book.metrics()) == (1, 200, {})


@pytest.mark.parametrize("num_visits", [1, KEPT_VISITS])
def test_a_visit_takes_few_bytes(num_visits: int):
    """Of 16 responses: 200 at most, beside the header of the prompt's array."""
    num_prompts = 1_300
    tracemalloc.start()
    try:
        book = large_book(num_prompts, num_visits)
        book._recent.clear()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(book) == num_prompts
    assert num_bytes / num_prompts <= 200 * num_visits + sys.getsizeof(np.zeros((2, 0), dtype=np.int32))


def test_the_bound_of_memory_holds_while_a_book_is_saved_or_loaded(tmp_path: Path):
    num_visits = 5_600  # of as many prompts; the table of prompts has just grown
    tracemalloc.start()
    try:
        book = large_book(num_visits, 1)
        book.save(tmp_path / "lengths.npz")
        _, saving = tracemalloc.get_traced_memory()
        del book
        tracemalloc.reset_peak()
        LengthBook().load(tmp_path / "lengths.npz")
        _, loading = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bound = most_bytes(num_visits=num_visits, visit_responses=GROUP_SIZE)
    assert 0.5 * bound < max(saving, loading) <= bound


def test_a_book_is_loaded_with_few_calls(tmp_path: Path):
    """Of functions, in Python or compiled: no forecast is made."""
    path = tmp_path / "lengths.npz"
    large_book(2_000, KEPT_VISITS).save(path)
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    book = LengthBook()
    sys.setprofile(count)
    try:
        book.load(path)
    finally:
        sys.setprofile(None)
    assert len(book) == 2_000 and num_calls < 2 * len(book)


def test_an_unseen_prompt_has_the_expectation_of_the_others():
    book = LengthBook()
    assert book.expected(1) == PRIOR_MEAN
    book.observe(1, 0, [100, 300])
    assert book.expected(2) == 200
    assert book.estimate(2).num_observations == 0


def test_the_last_visit_counts_most_and_old_ones_are_forgotten():
    book = LengthBook()
    for step, length in enumerate((10_000, 100, 100, 100, 100)):
        book.observe(7, step, [length] * 8)
    assert book.expected(7) == pytest.approx(100)
    assert book.estimate(7).num_observations == 8 * KEPT_VISITS


def test_forecast_quality_is_measured():
    generator = np.random.default_rng(0)
    known, unknown = LengthBook(), LengthBook()
    own = generator.lognormal(6, 0.8, 200)
    for step in (0, 1):
        for key, mean in enumerate(own):
            known.observe(key, step, (mean * generator.lognormal(0, 0.1, 4) + 1).astype(int).tolist())
            unknown.observe(key, step, (generator.lognormal(6, 0.8, 4) + 1).astype(int).tolist())
    assert known.correlation() > 0.95 > 0.5 > abs(unknown.correlation())
    assert known.metrics()["planner/forecast_error"] < 0.15 < 0.3 < unknown.metrics()["planner/forecast_error"]
    assert LengthBook().metrics() == {} and np.isnan(LengthBook().correlation())
