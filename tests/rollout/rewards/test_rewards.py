"""Built-in rule rewards case by case, and permitted return values of reward functions."""

import asyncio
import math
import re
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rollout.rewards import exact
from rollout.rewards import math as mathematics
from rollout.rewards.call import (
    RewardOutcome,
    RewardRequest,
    call_reward,
    call_reward_async,
    late_score,
    read_outcome,
)
from tests.support import reward_functions
from tests.support.runs.background import ROOT


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
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("\\boxed{0.5}", "\\frac{1}{2}"),
        ("\\boxed{-\\dfrac{1}{2}}", "-1/2"),
        ("\\boxed{5 \\text{ cm}^2}", "5"),
        ("\\boxed{10{,}000\\,\\mathrm{m}}", "10000"),
        ("\\boxed{90^\\circ}", "90"),
        ("\\boxed{\\$18}", "18"),
        ("\\boxed{x = 7}", "7"),
        ("The answer is \\(42\\).", "42"),
        ("The answer is 3 + 4 = **7** apples", "7"),
        ("answer: 60 km/h", "60"),
        ("answer: a 3-year plan", "3"),
        ("answer: 25 cm²", "25"),
        ("\\boxed{1, 2, 3}", "1,2,3"),
        ("answer: 50 %.", "50"),
        ("\\boxed{42}\n\nThis answer is consistent.", "42"),
        ("#### 42\n\nThe answer is correct.", "42"),
        ("I fill \\boxed{} later. The answer is 42", "42"),
        ("#### Step 1: add\nThe answer is 42", "42"),
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
        ("\\boxed{\\frac{1}{2}}", "2"),
        ("\\boxed{\\sqrt{2}}", "2"),
        ("\\boxed{1\\frac{1}{2}}", "5.5"),
        ("\\boxed{2\\pi}", "2"),
        ("\\boxed{2x}", "2"),
        ("\\boxed{x-5}", "-5"),
        ("\\boxed{x^2 = 4}", "4"),
        ("\\boxed{(3,5)}", "5"),
        ("\\boxed{2,3}", "23"),
        ("\\boxed{1,00}", "100"),
        ("answer: 5 or 7", "7"),
        ("answer: 5 pi", "5"),
        ("answer: \N{MINUS SIGN}7", "7"),
        ("answer: 7, in the box \\boxed{8}, no, the answer is 7", "7"),
    ],
)
def test_wrong_answers_score_zero(response, truth):
    assert score_of(exact, response, truth) == 0.0


@pytest.mark.parametrize(
    "text", ["\\boxed{", "#### 1\n", "\\boxed{=" + " " * 9, "####answer is", "answer is " + "(" * 9, "\\text{"]
)
def test_a_response_that_repeats_itself_is_read_in_time(text):
    begin = time.process_time()
    score_of(exact, text * 10_000, "7")
    score_of(exact, f"\\boxed{{{text * 10_000}", "7")
    assert time.process_time() - begin < 5.0


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


def test_a_module_may_declare_a_finite_number_as_the_score_of_late_calls(monkeypatch):
    assert late_score("rollout.rewards.math.compute_score") == 0.0
    function = "tests.support.reward_functions.moody"
    assert late_score(function) is None
    monkeypatch.setattr(reward_functions, "LATE_SCORE", -1, raising=False)
    assert late_score(function) == -1.0
    for score in ("zero", math.nan, 10**400):
        monkeypatch.setattr(reward_functions, "LATE_SCORE", score)
        with pytest.raises(ValueError, match=r"LATE_SCORE.* of .*moody is .*must be a finite number"):
            late_score(function)


def test_the_server_of_the_workers_imports_math_verify_before_it_forks():
    code = (
        "import sys; from rollout.rewards.call import check_reward; "
        "check_reward('rollout.rewards.math.compute_score', timeout_s=1.0, cpu_s=1.0); "
        "print('math_verify' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip() == "True"


def test_a_reward_that_is_not_finite_is_an_error():
    assert "not finite" in read_outcome(math.nan, function="f").error
    assert "not finite" in read_outcome({"score": 10**400}, function="f").error
    assert "not finite" in read_outcome(10**5000, function="f").error


def test_details_that_are_not_finite_are_left_out():
    returned = {"score": 1.0, "pred": 10**400, "length": math.inf, "steps": 3}
    assert read_outcome(returned, function="f") == RewardOutcome(reward=1.0, details=(("steps", 3.0),))


@pytest.mark.parametrize("value", [math.nan, -math.inf, 10**30_000 // 10**29_600])
def test_an_accuracy_that_is_not_finite_is_an_error_and_not_the_reward(value):
    outcome = read_outcome({"score": -1.0, "acc": value}, function="f")
    assert f"`acc` = {str(value)[:20]}" in outcome.error
    assert not outcome.details


@pytest.mark.parametrize("true", [np.bool_(True), np.float32(1), np.array(1), torch.tensor(True), torch.tensor(1.0)])
def test_a_single_value_of_numpy_or_torch_is_a_number(true):
    outcome = read_outcome({"score": -1.0, "acc": true, "parsed": true, "each": np.array([1.0, 2.0])}, function="f")
    assert outcome == RewardOutcome(reward=-1.0, details=(("acc", 1.0), ("parsed", 1.0)))
    assert read_outcome({"score": true, "acc": None}, function="f") == RewardOutcome(reward=1.0)


@pytest.mark.parametrize("value", ["yes", Decimal(1), np.array([1.0]), [True], np.str_("1"), 1j])
def test_an_accuracy_that_is_no_number_is_an_error_that_names_it_and_not_the_reward(value):
    outcome = read_outcome({"score": -1.0, "acc": value}, function="pkg.f")
    assert re.match(r"reward.function: pkg.f returned `acc` = .*; it must be a number from 0 to 1", outcome.misuse)
    assert not outcome.details


def returns_an_odd_number(**_):
    return {"score": Odd(), "acc": 1.0}


class Odd(Fraction):
    def __float__(self):
        raise RuntimeError("no float")


async def awaits_an_odd_number(**_):
    return returns_an_odd_number()


@pytest.mark.parametrize("name", ["returns_an_odd_number", "awaits_an_odd_number"])
def test_a_number_that_cannot_be_read_is_an_error_of_the_call(name):
    request = RewardRequest(
        function=f"{__name__}.{name}", data_source="", solution_str="", ground_truth="", extra_info_json="null"
    )
    outcome = (
        asyncio.run(call_reward_async(request, timeout_s=60)) if name.startswith("await") else call_reward(request)
    )
    assert outcome.error == "RuntimeError: no float"


def test_an_exception_of_a_reward_function_becomes_text():
    request = RewardRequest(
        function="rollout.rewards.math.compute_score",
        data_source="set",
        solution_str="4",
        ground_truth="",
        extra_info_json="null",
    )
    assert call_reward(request).error.startswith("ValueError: ground truth ''")
