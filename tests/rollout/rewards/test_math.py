r"""The reward by mathematical equality: ground truths as data sets write them, and answers that must not pass."""

import time

import pytest

from rollout.rewards import math as rewards_math
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
    *(r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} -2 & 3 \\ 1 & 0 \end{pmatrix}"),
    *(r"\left(\begin{matrix} 1 \\ 2 \end{matrix}\right)", r"\begin{bmatrix} 1 \\ 7 \end{bmatrix}"),
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
        (r"\boxed{2}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\boxed{0}", r"\begin{pmatrix} -2 & 3 \\ 1 & 0 \end{pmatrix}"),
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
        (r"\boxed{34}", '["34"]'),
        (r"\boxed{34}", "[34]"),
        (r"\boxed{1/2}", r'["\\frac{1}{2}"]'),
        (r"\boxed{1000}", "1 000 dollars"),
        (r"\boxed{1/2}", r"\frac{1}{2} cups"),
        (r"\boxed{7}", "3+4=7 apples"),
        (r"\boxed{3}", "3:00 on Tuesday"),
        (r"\boxed{7}", "He has 3. The answer is 7"),
    ],
)
def test_other_forms_of_the_same_value_are_right(answer: str, truth: str) -> None:
    assert score(answer, truth) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "other"),
    [
        ("Answer: 5\nI used 2 ways.", "5", "2"),
        ("**Answer:** 5\n\nIt took 3 steps.", "5", "3"),
        ("**Answer**: 5\n\nIt took 3 steps.", "5", "3"),
        ("**Answer: 5**\n\nIt took 3 steps.", "5", "3"),
        ("**Answer:**\n5\n\nIt took 3 steps.", "5", "3"),
        ("ANSWER : $5$. It took 3 steps.", "5", "3"),
        ("answer:5\nIt took 3 steps.", "5", "3"),
        ("Answer: 4. Wait, 7 is odd. Answer: 6", "6", "4"),
        ("Final Answer: 15. The sum of its digits is 6.", "15", "6"),
        ("The final answer is 5. It took 3 steps.", "5", "3"),
        ("The final answer to the question is 5. It took 3 steps.", "5", "3"),
        ("So the answer is 34. It has 2 digits.", "34", "2"),
        ("So the answer is: 34\nIt has 2 digits.", "34", "2"),
        ("The answer is therefore **34**. It has 2 digits.", "34", "2"),
        ("The answer is **34**. It has 2 digits.", "34", "2"),
        ("**Answer:** **34**, a number of 2 digits", "34", "2"),
    ],
)
def test_without_a_box_the_answer_stands_behind_its_mark(response: str, answer: str, other: str) -> None:
    assert (score(response, answer), score(response, other)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("response", "answer", "other"),
    [
        ("The possible answers are 12 and 15. Only 15 is prime, so the result is 15.", "15", "12"),
        ("The answer cannot be 15, so we get 12.", "12", "15"),
        ("The answer is not 15, so we get 12.", "12", "15"),
        ("The answer isn't 15, so we get 12.", "12", "15"),
        ("The answer is one of 12 and 15. We find 15.", "15", "12"),
        ("If the answer was 12, x would be even. It is 15.", "15", "12"),
        ("The final answer must lie between 12 and 15. We find 13.", "13", "12"),
        ("The answers are 3 and 8, and their sum is 11.", "11", "3"),
        ("He answered 45 questions and 8 by luck, so he has 53 points.", "53", "45"),
        ("He answered 45 questions and 8 by luck.\n45 + 8 = 53.\n#### 53", "53", "45"),
        ("No answer below 10 fits,\nso it must be $17$.", "17", "10"),
        ("We answer in two steps.\n\nFirst $3$, then $5$.", "5", "3"),
        ("**Answer**\n\nOf 12 apples 3 are bad, so 9 are left.", "9", "12"),
    ],
)
def test_the_word_answer_alone_is_no_mark_and_the_last_number_or_formula_counts(
    response: str, answer: str, other: str
) -> None:
    assert (score(response, answer), score(response, other)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("solution", "answer", "other"),
    [
        ("He answered 45 questions and 8 by luck.\n45 + 8 = <<45+8=53>>53.\n#### 53", "53", "45"),
        ("Answer: he has 3.\nHis final answer is 7.\n#### 12", "12", "7"),
        ("It costs $5 + $6 = $11.\n#### $11", "11", "5"),
        ("10 * 145 = <<10*145=1450>>1450\n#### 1,450", "1450", "10"),
        ("#### Step 1\n2 + 3 = 5\n#### Step 2\n5 - 8 = -3\n#### -3", "-3", "5"),
        ("He runs 4 times.\n#### 0.25", "0.25", "4"),
    ],
)
def test_of_a_solution_with_marks_what_follows_the_last_mark_is_the_ground_truth(
    solution: str, answer: str, other: str
) -> None:
    assert (score(rf"\boxed{{{answer}}}", solution), score(rf"\boxed{{{other}}}", solution)) == (1.0, 0.0)


@pytest.mark.parametrize(
    "text", ["answer is ", "final answer ", "answer" + " " * 9, "answer is " + "*" * 9, "** **a**"]
)
def test_a_response_that_repeats_the_word_answer_is_read_in_time(text: str) -> None:
    began = time.process_time()
    for response in (text * 5_000, text + " " * 50_000):
        rewards_math._ANSWER.sub(rewards_math._kept, rewards_math._BOLD.sub(r"\1", response))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "123456789^{987654321}", "99999999!", "9^9^9^9", r"\frac{1}{9^{9^9}}"])
def test_an_answer_that_no_computer_could_write_down_is_wrong_at_once(answer: str) -> None:
    began = time.monotonic()
    assert compute_score("set", rf"\boxed{{{answer}}}", "42", None) == {"score": 0.0, "parsed": 1.0}
    assert time.monotonic() - began < 60, "without the bound the comparison does not end"


ANSWERS = [
    *((r"\sqrt{51}", "51"), (r"2\pi", "2"), (r"3\sqrt{13}", "3"), (r"\frac{\sqrt{3}}{2}", "2"), (r"\frac 59", "5")),
    *(
        ("(3, 4)", "3"),
        ("1,2", "1"),
        (r"\{1,2\}", "2"),
        ("[0,1)", "0"),
        ("(3,5]", "5"),
        ("a=1, b=2", "1"),
        ("x=1, x=2", "1"),
    ),
    *(("x^2+1", "2"), ("4x^2-1", "4"), ("2x", "2"), ("2k+2", "2"), ("p - q", "p"), ("-(x-2)(x+2)", "2")),
    *(("6-5i", "6"), ("6 - 5i", "5"), ("2^{10}", "2"), ("10^{-3}", "10"), (r"1.2 \times 10^5", "1.2"), ("e^{2}", "2")),
    *(("C", "D"), ("(A)", "(B)"), (r"\text{Evelyn}", r"\text{Briana}"), (r"\text{June 20}", r"\text{June 2}")),
    *((r"\left( 3, \frac{\pi}{2} \right)", "3"), (r"(-\infty, 2) \cup (3,\infty)", "3"), (r"x \in [-2,7]", "7")),
    *((r"1 \pm \sqrt{19}", "1"), (r"\log_{2} 3", "3"), (r"\binom{10}{3}", "10"), (r"2\sqrt{3}\text{ cm}", "2")),
    *((r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "2"), (r"\begin{pmatrix} -2 & 3 \\ 1 & 0 \end{pmatrix}", "0")),
    *(("y = 2x + 3", "3"), (r"x = 2\pi", "2"), ("x < 5", "5"), (r"1\frac{1}{2}", "1"), ("3:2", "3")),
    *(("34", "35"), ("-3", "3"), ("1,000", "1"), ("204", "20"), ("0.5", "5"), ("-1/2", "1/2"), (r"\frac{14}{3}", "14")),
    *((r"90^\circ", "9"), (r"5 \text{ cm}", "6"), (r"50\%", "5"), ("042", "4"), (r"\infty", "8"), (r"\pi", "3")),
]
"""Answers as in MATH-500, DAPO and AIME, each with a part or a neighbour of it."""
FORMS = [
    *(r"So it is \boxed{%s}.", "Then 7 remain, so $%s$.", "We need 7 steps.\n\nAnswer: $%s$", r"The answer is \(%s\)."),
    *("We need 7 steps.\n\nAnswer: %s", "**Answer:** %s\n", "**Answer: %s**", "Answer:\n\n%s", "ANSWER : %s."),
    *("We need 7 steps. The answer is %s", "So the answer is: %s.", "The final answer is %s"),
]


@pytest.mark.parametrize(("answer", "other"), ANSWERS)
def test_an_answer_is_equal_to_itself_and_not_to_its_part_in_every_form(answer: str, other: str) -> None:
    scores = {form: (score(form % answer, answer), score(form % answer, other)) for form in FORMS}
    assert scores == dict.fromkeys(FORMS, (1.0, 0.0))


@pytest.mark.parametrize(
    "line",
    [
        *("34 m", "34 m/s", "34 m^2", "34 cm", "34s", "34 A", "34!", "34%", r"34\%", "34°", r"34 \text{ apples}"),
        *("34 apples", "34 of them", "34, not 35", "34 or 35", "34, since 2 + 32 = 34", "34 (or 35)", "34 €"),
        *("34[1]", "34(1)", "(a) 34", "a) 34", "(i) 34", "b 34", r"34 \blacksquare", "5x = 10, x = 34", "34!!"),
        *(
            "34 [2]",
            r"\textbf{(C)}\ 34",
            "(C) 34",
            "C) 34",
            "C. 34",
            "C: 34",
            "A 34",
            "34 (C)",
            "x = 34",
            "x=34",
            "n = 34 m",
            "m+n = 34",
        ),
        *("2 x 17 = 34", "2 * 17 = 34", "34 = 2*17", "f(2) = 34", r"\angle A = 34"),
        *(r"2x = 68 \implies x = 34", r"\approx 34", "≈ 34", "- 34", r"34 \pmod{100}"),
        *(r"\therefore 34", r"34 \\", "34</s>", "34<|im_end|>", "34?", "34.", "34 .", "34,", "34:", r"\text{It is 34}"),
        *("34\n\nCheck: 2 + 32 = 34", "34\nSo x = 7.", "\n\nx = 7\nx = 34", "x\nwhere x = 34", "n\n\nn = 34"),
    ],
)
def test_behind_a_mark_a_number_with_a_remark_is_the_number(line: str) -> None:
    assert score(f"We need 9 steps.\n\nAnswer: {line}", "34") == 1.0


@pytest.mark.parametrize(
    ("line", "truth"),
    [
        *(("0,5", "0.5"), ("1 234", "1234"), ("1,234", "1234"), ("x = 1,234", "1234"), ("f(2) = 1,234", "1234")),
        *(
            ("-5%", "-5"),
            ("3/4 m", "3/4"),
            ("1,234 m", "1234"),
            ("1e5", "100000"),
            (r"\frac{3}{4}!", "3/4"),
            (r"b \frac{3}{4}", "3/4"),
        ),
    ],
)
def test_behind_a_mark_other_ways_to_write_a_number_count(line: str, truth: str) -> None:
    assert score(f"We need 9 steps.\n\nAnswer: {line}", truth) == 1.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("We get 34.\n\nAnswer: C", "34"),
        ("We get (C) 34. So the answer is C.", "34"),
        ("The final answer is 34 = x", "34"),
        ("The final answer is 3/4 = n^2 + 2", "3/4"),
        ("Suppose the answer is n.\n\nThen n = 34", "34"),
        (r"\boxed{34}. So the answer is C.", "34"),
        (r"So \boxed{x+1}, and Answer: 2", "x+1"),
        (r"\boxed{3}, no, the final answer is 2\pi", r"2\pi"),
        (r"Answer: 2\pi" "\n\nI used 2 ways.", r"2\pi"),
        (r"Answer: 2" "\n\nNo, check again.\n\n" r"Answer: 2\pi", r"2\pi"),
    ],
)
def test_a_formula_behind_a_mark_counts_only_where_the_mark_decides(response: str, truth: str) -> None:
    assert score(response, truth) == 1.0


@pytest.mark.parametrize("text", ["Answer: ", "answer is x ", r"\text{", "1 x ", "=,", "{1 ", "x", "5x", "x,"])
def test_a_response_whose_last_line_repeats_itself_is_read_in_time(text: str) -> None:
    began = time.process_time()
    for response in (text * 20_000, "Answer: " + text * 20_000, "Answer: " + (text * 500)[:500], "\n" + text * 20_000):
        rewards_math._marked_formula(response)
    rewards_math._ALSO_BARE.fullmatch((text * 500)[:500])
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    "truth",
    [
        *('["34", "35"]', '{"target": ["34"]}', "{}", "[]", '["34", 35]', '[["34"]]'),
        *("3 hours 20 minutes", "between 3 and 7", "12 apples and 5 pears", "June 20, 2024", "first: 5, second: 7"),
    ],
)
def test_a_ground_truth_of_several_answers_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="cannot be parsed as mathematics; give one answer as text, such as `34`"):
        score(r"\boxed{34}", truth)


@pytest.mark.parametrize(
    "truth",
    [
        *(r"\begin{cases} x=1 \\ y=7 \end{cases}", r"$\begin{cases} x=1 \\ y=7 \end{cases}$"),
        *(r"\begin{cases} 7 & x>0 \end{cases}", r"f(x)=\begin{cases} x & x<7 \\ 5 & x\ge 7\end{cases}"),
        *(r"\begin{aligned} x&=1\\ y&=7\end{aligned}", r"\begin{gathered} 3 \\ 7 \end{gathered}"),
        *(r"\left\{\begin{array}{l} x=1 \\ y=7 \end{array}\right.", r"\begin{array}{r} 4 \\ \hline 7 \end{array}"),
        *(r"\begin{Bmatrix} 1 \\ 7 \end{Bmatrix}", r"\begin{bmatrix} 1 & \cdots & 7 \end{bmatrix}"),
    ],
)
def test_rows_that_are_no_matrix_are_refused_and_not_compared_by_one_of_their_numbers(truth: str) -> None:
    for response in (r"\boxed{7}", rf"\boxed{{{truth}}}"):
        with pytest.raises(ValueError, match="cannot be parsed as mathematics; give one answer as text"):
            score(response, truth)


@pytest.mark.parametrize(
    ("truth", "part"),
    [
        (r"x=\begin{pmatrix} 1 \\ 7 \end{pmatrix}", "7"),
        (r"\begin{pmatrix} 1 \\ 7 \end{pmatrix} + t\begin{pmatrix} 2 \\ 3 \end{pmatrix}", "3"),
        (r"3\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "4"),
        (r"\left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]", "4"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}, \begin{pmatrix} 3 \\ 4 \end{pmatrix}", "4"),
        (r"$\begin{bmatrix} 1 & 7 \end{bmatrix}$", "7"),
        (r"\begin{aligned} x &= 7 \end{aligned}", "8"),
    ],
)
def test_matrices_within_a_formula_are_read_whole(truth: str, part: str) -> None:
    assert (score(rf"\boxed{{{truth.strip('$')}}}", truth), score(rf"\boxed{{{part}}}", truth)) == (1.0, 0.0)


def test_a_determinant_is_its_value() -> None:
    truth = r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}"
    assert (score(r"\boxed{-2}", truth), score(r"\boxed{4}", truth)) == (1.0, 0.0)


def test_the_last_box_counts_alone_and_boxes_together_are_a_set() -> None:
    assert score(r"\boxed{33}, wait, \boxed{34}", "34") == 1.0
    assert score(r"\boxed{34}, wait, \boxed{33}", "34") == 0.0
    assert score(r"The roots are \boxed{1} and \boxed{2}.", r"\{1,2\}") == 1.0


def test_a_response_without_mathematics_has_no_answer_and_an_empty_ground_truth_is_an_error() -> None:
    assert compute_score("set", "I give up", "42", None) == {"score": 0.0, "parsed": 0.0}
    with pytest.raises(ValueError, match="ground truth '' cannot be parsed"):
        score(r"\boxed{3}", "")
