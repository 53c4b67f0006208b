import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tracing.engine_speed import MIN_FORWARDS, NUM_EVIDENT, EngineSpeed, fit_speed
from rollout.tracing.forwards import FORWARD

FIXED_S, TOKEN_S, CONTEXT_S = 0.02, 1e-4, 1e-7


def forwards(requests: np.ndarray, context: np.ndarray, tokens: np.ndarray | None = None):
    found = np.zeros(len(requests), dtype=FORWARD)
    found["num_running"] = requests
    found["num_scheduled_tokens"] = requests if tokens is None else tokens
    found["num_context_tokens"] = context
    found["seconds"] = FIXED_S + TOKEN_S * found["num_scheduled_tokens"] + CONTEXT_S * context
    found["started_at_s"] = np.cumsum(found["seconds"])
    return found


def of_a_run(seed: int = 0, count: int = 2000):
    random = np.random.default_rng(seed)
    requests = random.integers(1, 65, size=count)
    return forwards(requests, requests * random.integers(10, 4000, size=count))


def test_the_fit_recovers_the_costs_of_forwards_despite_slow_outliers():
    found = of_a_run()
    random = np.random.default_rng(1)
    found["seconds"] *= random.lognormal(0, 0.1, size=len(found))
    found["seconds"][::50] *= 30
    speed = fit_speed(found)
    assert speed is not None
    assert speed.fixed_s == pytest.approx(FIXED_S, rel=0.1)
    assert speed.context_s == pytest.approx(CONTEXT_S, rel=0.2)
    assert speed.saturated_requests == 64


def test_a_full_forward_is_saturated_and_a_single_request_bears_the_whole_fixed_cost():
    speed = EngineSpeed(fixed_s=0.02, token_s=1e-4, context_s=0.0, saturated_requests=100)
    shares = speed.saturated_shares(forwards(np.array([100, 200, 1, 50]), np.zeros(4)))
    assert shares.tolist() == pytest.approx([1.0, 1.0, (0.02 / 100 + 1e-4) / (0.02 + 1e-4), (0.01 + 5e-3) / 0.025])


def test_long_context_counts_as_work_and_not_as_bubble():
    speed = EngineSpeed(fixed_s=0.01, token_s=0.0, context_s=1e-6, saturated_requests=10)
    short, long = speed.saturated_shares(forwards(np.array([1, 1]), np.array([0, 10**6])))
    assert short == pytest.approx(0.1)
    assert long == pytest.approx(1.001 / 1.01)


def test_a_concurrency_counts_only_with_enough_forwards():
    found = of_a_run()
    found["num_running"] = 20
    found["num_running"][: NUM_EVIDENT - 1] = 500
    speed = fit_speed(found)
    assert speed is not None
    assert speed.saturated_requests == 20


def test_too_few_forwards_give_no_speed():
    assert fit_speed(of_a_run(count=MIN_FORWARDS - 1)) is None
    empty = of_a_run(count=2 * MIN_FORWARDS)
    empty["seconds"] = 0
    assert fit_speed(empty) is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), spread=st.floats(0, 3))
def test_saturated_shares_lie_between_zero_and_one(seed, spread):
    found = of_a_run(seed, count=100)
    found["seconds"] *= np.random.default_rng(seed).lognormal(0, spread, size=len(found))
    speed = fit_speed(found)
    assert speed is not None
    assert min(speed.fixed_s, speed.token_s, speed.context_s) >= 0
    shares = speed.saturated_shares(found)
    assert ((shares >= 0) & (shares <= 1)).all()
