import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.lengths.book import KEPT_VISITS, LengthBook
from history.lengths.estimate import PRIOR_MEAN

VISITS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 20), st.lists(st.integers(0, 900), min_size=1, max_size=6)), max_size=25
)


def book_of(visits) -> LengthBook:
    book = LengthBook()
    for key, step, lengths in sorted(visits, key=lambda visit: visit[1]):
        book.observe(key, step, lengths)
    return book


@given(visits=VISITS)
def test_the_expected_length_is_the_mean_of_the_estimate_with_all_lengths_as_prior(visits):
    book = book_of(visits)
    book.check_integrity()
    for key in range(7):
        assert book.expected(key) == pytest.approx(book.estimate(key).mean)


@given(visits=VISITS)
def test_a_saved_book_has_bitwise_equal_expectations(visits, tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "lengths.npz"
    book, again = book_of(visits), LengthBook()
    book.save(path)
    again.load(path)
    again.check_integrity()
    assert [again.expected(key) for key in range(7)] == [book.expected(key) for key in range(7)]


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
