r"""The reward by mathematical equality: ground truths as data sets write them, and answers that must not pass."""

import time

import pytest

from rollout.rewards.math import compute_score


def score(response: str, truth: str) -> float:
    return compute_score("set", response, truth, None)["score"]


BARE = [
    *("34", "-3", "1,000", "0.5", "3.50", r"\frac{1}{2}", r"1\frac{1}{2}", r"2\pi", r"10\sqrt{2}", "2^{10}"),
    *(
        "5!",
        "3:2",
        r"(\frac{1}{2},3)",
        "x^2+1",
        "4x^2-1",
        r"6 - 5i",
        "[0, 1]",
        "[0,1)",
        r"\{1,2\}",
        "1,2",
        r"1.2 \times 10^5",
    ),
    *(r"\text{Evelyn}", "(A)", "B", r"90^\circ", r"50\%", "2*sqrt(3)", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\infty"),
    *(r"\left( 3, \frac{\pi}{2} \right)", "10^{-3}", "x=5", "p^2-q", r"2\sqrt{3}\text{ cm}"),
]


@pytest.mark.parametrize("truth", BARE)
def test_a_bare_ground_truth_in_latex_is_read_whole(truth: str) -> None:
    assert score(rf"So we have $7$ cases. The answer is \boxed{{{truth}}}.", truth) == 1.0
    assert score(r"The answer is \boxed{8041}.", truth) == 0.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\boxed{2}", r"2\pi"),
        (r"\boxed{10}", r"10\sqrt{2}"),
        (r"\boxed{2}", "2^{10}"),
        (r"\boxed{5}", "5!"),
        (r"\boxed{5}", "6 - 5i"),
        (r"\boxed{1}", "[0, 1]"),
        (r"\boxed{4}", "4x^2-1"),
        (r"\boxed{1/2}", r"(\frac{1}{2},3)"),
        (r"\boxed{\frac12}", r"1\frac{1}{2}"),
    ],
)
def test_a_part_of_the_ground_truth_is_a_wrong_answer(answer: str, truth: str) -> None:
    assert score(answer, truth) == 0.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\boxed{72}", "Each has 5 + 67 = 72.\n#### 72"),
        (r"\boxed{34}", "$34$"),
        (r"\boxed{34}", r"\boxed{34}"),
        (r"\boxed{18}", "18 dollars"),
        (r"\boxed{18}", r"\$18"),
        (r"\boxed{7}", "The answer is 7"),
        (r"\boxed{x+1}", r"\(x+1\)"),
        (r"\boxed{0.001}", "1e-3"),
        (r"\boxed{1024}", "2^{10}"),
        (r"\boxed{\dfrac{6}{4}}", r"1\frac{1}{2}"),
        ("the answer is 34", "34"),
    ],
)
def test_other_forms_of_the_same_value_are_right(answer: str, truth: str) -> None:
    assert score(answer, truth) == 1.0


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "123456789^{987654321}", "99999999!", "9^9^9^9", r"\frac{1}{9^{9^9}}"])
def test_an_answer_that_no_computer_could_write_down_is_wrong_at_once(answer: str) -> None:
    began = time.monotonic()
    assert compute_score("set", rf"\boxed{{{answer}}}", "42", None) == {"score": 0.0, "parsed": 1.0}
    assert time.monotonic() - began < 60, "without the bound the comparison does not end"


def test_the_last_box_counts_alone_and_boxes_together_are_a_set() -> None:
    assert score(r"\boxed{33}, wait, \boxed{34}", "34") == 1.0
    assert score(r"\boxed{34}, wait, \boxed{33}", "34") == 0.0
    assert score(r"The roots are \boxed{1} and \boxed{2}.", r"\{1,2\}") == 1.0


def test_a_response_without_mathematics_has_no_answer_and_an_empty_ground_truth_is_an_error() -> None:
    assert compute_score("set", "I give up", "42", None) == {"score": 0.0, "parsed": 0.0}
    with pytest.raises(ValueError, match="ground truth '' cannot be parsed"):
        score(r"\boxed{3}", "")
