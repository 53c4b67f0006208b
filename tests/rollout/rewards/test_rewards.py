"""Built-in rule rewards case by case, and permitted return values of reward functions."""

import math

import pytest

from rollout.rewards import exact
from rollout.rewards import math as mathematics
from rollout.rewards.call import RewardOutcome, RewardRequest, call_reward, read_outcome


def score_of(module, response, truth):
    return module.compute_score(data_source="set", solution_str=response, ground_truth=truth, extra_info=None)["score"]


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("3 + 4 = 7", "7"),
        ("so the answer is 1,000.", "1000"),
        ("Answer: $1000", "1,000.0"),
        ("#### -12", "-12"),
        ("#### .5", "1/2"),
        ("first \\boxed{3}, finally \\boxed{2/4}", "0.5"),
        ("\\boxed{\\frac{a}{b}}", "\\frac{a}{b}"),
        ("answer: **42**", "42"),
        ("The answer is 42 apples", "42"),
        ("answer: 25%", "25"),
        ("Answer: New  York.", "new york"),
        ("answer:\n17", "17"),
        ("18 dollars\n#### 18", "She sells 9 x 2 = <<9*2=18>>18\n#### 18"),
        ("1e3", "1000"),
    ],
)
def test_right_answers_score_one(response, truth):
    assert score_of(exact, response, truth) == 1.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("3 + 4 = 8", "7"),
        ("7, no: answer: 8", "7"),
        ("answer:", "7"),
        ("7 answer:", "7"),
        ("\\boxed{7", "7"),
        ("", "7"),
        ("no idea", "7"),
        ("answer: 1/0", "7"),
        ("answer: Paris", "London"),
        ("70", "7"),
        ("", ""),
    ],
)
def test_wrong_answers_score_zero(response, truth):
    assert score_of(exact, response, truth) == 0.0


def test_parsed_tells_whether_an_answer_was_extracted():
    def parsed(text):
        return exact.compute_score(data_source="", solution_str=text, ground_truth="7", extra_info=None)["parsed"]

    assert [parsed("8"), parsed("answer: x"), parsed("answer:"), parsed("well")] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so $x = \\frac{1}{2}$, \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("the answer is $\\{1, 2\\}$", "$\\{2, 1\\}$", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("I do not know", "4", 0.0),
    ],
)
def test_mathematically_equal_answers_may_differ_in_text(response, truth, score):
    assert score_of(mathematics, response, truth) == score


def test_numbers_and_dicts_are_accepted_and_further_numbers_become_details():
    assert read_outcome(1, function="f") == RewardOutcome(reward=1.0)
    assert read_outcome(True, function="f") == RewardOutcome(reward=1.0)
    returned = {"score": 0.5, "acc": True, "note": "text", "steps": 3}
    assert read_outcome(returned, function="f") == RewardOutcome(reward=0.5, details=(("acc", 1.0), ("steps", 3.0)))


@pytest.mark.parametrize("returned", ["1.0", None, {"reward": 1.0}, [1.0], {"score": "high"}])
def test_other_return_values_are_errors_that_name_the_contract(returned):
    outcome = read_outcome(returned, function="pkg.f")
    assert "pkg.f" in outcome.misuse
    assert "dict with `score`" in outcome.misuse


def test_a_reward_that_is_not_finite_is_an_error():
    assert "not finite" in read_outcome(math.nan, function="f").error


def test_an_exception_of_a_reward_function_becomes_text():
    request = RewardRequest(
        function="rollout.rewards.math.compute_score",
        data_source="set",
        solution_str="4",
        ground_truth="",
        extra_info_json="null",
    )
    assert call_reward(request).error.startswith("ValueError: ground truth ''")
