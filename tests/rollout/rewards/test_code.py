"""The code reward: shapes of tests, comparison of outputs, and programs that try to pass without solving."""

import json

import pytest

from rollout.rewards import code
from rollout.rewards.call import check_reward
from rollout.rewards.code import compute_score, last_program
from rollout.rewards.sandbox import Ending, Limits, Outcome


def fenced(program: str) -> str:
    return f"I think so.\n```python\n{program}\n```\nDone."


def score(program: str, extra_info: object = None, **truth: object) -> dict[str, float]:
    return compute_score("code", fenced(program), json.dumps(truth), extra_info)


def test_the_last_fenced_block_is_the_program() -> None:
    assert last_program("```py\na\n```\ntext\n```\nb\n```\nend") == "b\n"
    assert last_program("print(1)") is None
    assert compute_score("code", "print(1)", json.dumps({"inputs": [""], "outputs": ["1"]}), None)["has_program"] == 0.0


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3", "1 2 3\n", True),
        ("0.3333333", "0.33333333", True),
        ("0.33", "0.3333", False),
        ("10", "10.0", True),
        ("1000000", "1000001", False),
        ("YES", "yes", False),
        ("", "1", False),
        ("nan.", "nan.", True),
    ],
)
def test_outputs_are_compared_word_by_word(output: str, expected: str, same: bool) -> None:
    assert code._same_output(output, expected) is same


@pytest.mark.parametrize("truth", ["no json", "[1]", "{}", '{"inputs": ["1"], "outputs": []}'])
def test_a_ground_truth_of_another_shape_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("code", fenced("print(1)"), truth, None)


def test_a_machine_without_isolation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "isolation_problem", lambda: "bubblewrap is missing")
    with pytest.raises(ValueError, match="bubblewrap is missing"):
        check_reward("rollout.rewards.code.compute_score", timeout_s=120)
    check_reward("rollout.rewards.exact.compute_score", timeout_s=10)


def test_a_time_limit_at_which_endless_loops_would_go_unscored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "isolation_problem", lambda: "")
    with pytest.raises(ValueError, match=r"`reward\.timeout_s` = 10: .* 60 s.*; set it to 120"):
        check_reward("rollout.rewards.code.compute_score", timeout_s=10)
    check_reward("rollout.rewards.code.compute_score", timeout_s=120)


def test_tests_of_a_response_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run(source: str, *, stdin: str, limits: Limits) -> Outcome:
        del source
        given.append(limits.wall_s)
        return Outcome(ending=Ending.EXITED, code=0, output=stdin)

    monkeypatch.setattr(code, "run_program", run)
    monkeypatch.setattr(code, "TOTAL_S", 7.0)
    score("print(input())", {"time_limit_s": 30}, inputs=["1", "2"], outputs=["1", "2"])
    assert 6.0 < given[1] <= given[0] <= 7.0


def test_tests_run_until_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def run(source: str, *, stdin: str, limits: object) -> Outcome:
        given.append(stdin)
        return Outcome(ending=Ending.EXITED, code=0, output=stdin)

    monkeypatch.setattr(code, "run_program", run)
    assert score("print(input())", inputs=["1", "2", "3"], outputs=["1", "5", "3"])["score"] == 0.0
    assert given == ["1", "2"]
    assert score("print(input())", inputs=["1", "2", "3"], outputs=["1", "2", "3"])["score"] == 1.0


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "truth", "passes"),
    [
        (
            "a, b = map(int, input().split())\nprint(a + b)",
            {"inputs": ["1 2\n", "5 6"], "outputs": ["3\n", "11"]},
            True,
        ),
        ("a, b = map(int, input().split())\nprint(a - b)", {"inputs": ["1 2\n"], "outputs": ["3\n"]}, False),
        ("def add(a, b):\n    return a + b", {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [3, [7]]}, True),
        ("def add(a, b):\n    return a", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, False),
        (
            "class Solution:\n    def pair(self, a):\n        return a, a",
            {"fn_name": "pair", "inputs": [["x"]], "outputs": [["x", "x"]]},
            True,
        ),
        ("def f():\n    return 1", {"assert_case": ["assert f() == 1", "assert f() > 0"]}, True),
        ("def f():\n    return 1", {"assert_case": ["assert f() == 2"]}, False),
    ],
)
def test_programs_pass_by_what_they_compute(program: str, truth: dict[str, object], passes: bool) -> None:
    assert score(program, **truth)["score"] == float(passes)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "truth"),
    [
        ("import os\nos._exit(0)", {"assert_case": ["assert False"]}),
        ("import sys\nsys.exit()\ndef f(): pass", {"fn_name": "f", "inputs": [[]], "outputs": [None]}),
        ("def f():\n    print('[1]')\n    return 2", {"fn_name": "f", "inputs": [[]], "outputs": [1]}),
        ("print(3)\nraise SystemExit(1)", {"inputs": [""], "outputs": ["3"]}),
        ("import sys\nprint(sys.argv, open(__file__).read())", {"inputs": [""], "outputs": ["7"]}),
    ],
)
def test_a_program_that_does_not_solve_its_tests_earns_nothing(program: str, truth: dict[str, object]) -> None:
    assert score(program, **truth)["score"] == 0.0


@pytest.mark.sandbox
def test_a_slow_program_is_counted_as_timed_out() -> None:
    result = score("while True:\n    pass", {"time_limit_s": 1}, inputs=[""], outputs=["1"])
    assert result == {"score": 0.0, "has_program": 1.0, "timed_out": 1.0}
