"""The code reward: shapes of tests, comparison of outputs, and programs that try to pass without solving."""

import json
import subprocess
import sys
import time
from pathlib import Path

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
    ("text", "program"),
    [
        ("```text\nplan\n```\nSo we write:\n```python\na\n```", "a\n"),
        ("```python\na\n```\nIt prints:\n```text\n3\n```\nDone.", "a\n"),
        ("```Python\r\na\r\n```\r\n", "a\r\n"),
        ("Here: ```python\na\n```", "a\n"),
        ("```python\na```", "a"),
        ("  ``` py\n  a\n  ```", "  a\n  "),
        ("```c++\nint a;\n```", None),
        ("```python\na\n", None),
        ("```python\na\n```\n```python\nb\n", "a\n"),
        ("```text\nplan\n\n```python\na\n```", "a\n"),
        ("```python\nprint('```', 1)\n```", "print('```', 1)\n"),
        ("Write ```x``` so:\n```\na\n``` So it ends.\n```text\n3\n```", "a\n"),
    ],
)
def test_the_last_block_in_python_is_the_program(text: str, program: str | None) -> None:
    assert last_program(text) == program


@pytest.mark.parametrize("text", ["`", "```", "```a", "``` `", "a ", "```python\n", "a```a```"])
def test_a_response_of_backticks_is_read_in_time(text: str) -> None:
    begin = time.process_time()
    last_program(text * 50_000)
    last_program("```" + text * 50_000 + "`x")
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        (3 * 0.1, 0.3, True),
        ([[1, 3 * 0.1], {"a": 3 * 0.1}], [[1, 0.3], {"a": 0.3}], True),
        (3 * 0.1, [0.3], True),
        (2, 2.0000001, True),
        (0.31, 0.3, False),
        (1_000_000, 1_000_001, False),
        (True, 1.0000001, False),
        (True, 1, True),
        (10**400, 0.5, False),
        ("0.30000000000000004", "0.3", False),
        ([1.0, 2.0], [1.0], False),
        ({"a": 1.0}, {"b": 1.0}, False),
    ],
)
def test_decimal_numbers_of_results_may_differ_a_little(result: object, expected: object, same: bool) -> None:
    assert code._same_value(result, expected) is same


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 100_000])
def test_a_forged_result_that_is_no_json_fails_its_test_alone(text: str) -> None:
    outcome = Outcome(ending=Ending.EXITED, code=0, output="mark" + text)
    assert not code._passes(code._Test(program="", mark="mark", expected=[1]), outcome)


@pytest.mark.parametrize("truth", [{"inputs": [""]}, {"fn_name": "f", "inputs": [[]]}])
def test_the_output_may_be_as_long_as_what_is_expected(truth: dict[str, object], plainly: list[Limits]) -> None:
    program = "def f():\n    return 'a' * 3_000_000\nif __name__ == '__main__':\n    print(f())"
    assert score(program, **truth, outputs=["a" * 3_000_000])["score"] == 1.0
    assert score(program, **truth, outputs=["a"])["score"] == 0.0
    assert [limits.output_bytes > 6_000_000 for limits in plainly] == [True, False]
    assert plainly[1].output_bytes == Limits().output_bytes


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Limits]:
    """Runs programs of these tests, which are no foreign code, without a sandbox; the limits that they had."""
    given: list[Limits] = []

    def run(source: str, *, stdin: str, limits: Limits) -> Outcome:
        given.append(limits)
        path = tmp_path / "program.py"
        path.write_text(source)
        command = [sys.executable, "-I", str(path)]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
        return Outcome(ending=Ending.EXITED, code=done.returncode, output=done.stdout)

    monkeypatch.setattr(code, "run_program", run)
    return given


TYPED = "class Solution:\n    def total(self, a: List[int]) -> int:\n        return sum(accumulate(a)) + math.gcd(4, 6)"
MAIN = "def f(n):\n    return n + 1\nif __name__ == '__main__':\n    print(f(int(input())))"
FUTURE = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: Later = 1\n"
)
SEARCH = "class Solution:\n    def search(self, nums):\n        return nums[0]"


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        (TYPED, {"fn_name": "total", "inputs": [[[1, 2]]], "outputs": [6]}),
        (TYPED, {"assert_case": ["assert isclose(Solution().total([1, 2]), 6.0)", "assert Counter('a') == {'a': 1}"]}),
        (
            "for line in sys.stdin:\n    print(deque([int(line)])[0], sqrt(4))",
            {"inputs": ["7\n"], "outputs": ["7 2.0"]},
        ),
        (MAIN, {"fn_name": "f", "inputs": [[1]], "outputs": [2]}),
        (MAIN, {"assert_case": ["assert f(1) == 2"]}),
        (MAIN, {"inputs": ["1\n"], "outputs": ["2\n"]}),
        (FUTURE + "def f():\n    return A().x", {"fn_name": "f", "inputs": [[]], "outputs": [1]}),
        (FUTURE + "print(A().x)", {"inputs": [" "], "outputs": ["1"]}),
        (SEARCH, {"fn_name": "search", "inputs": [[[5]]], "outputs": [5]}),
        ("def f():\n    return [3 * 0.1]", {"fn_name": "f", "inputs": [[]], "outputs": [[0.3]]}),
        (
            "import sys\ndef f():\n    return sys._getframe().f_lineno",
            {"fn_name": "f", "inputs": [[]], "outputs": [3]},
        ),
        ("def f():\n    return sum([pow(2, 3)])", {"fn_name": "f", "inputs": [[]], "outputs": [8]}),
    ],
)
def test_programs_need_no_usual_imports_and_no_main_part(
    program: str, truth: dict[str, object], plainly: list[Limits]
) -> None:
    assert score(program, **truth)["score"] == 1.0


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        ("x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}),
        ("def f():\n    return unknown", {"fn_name": "f", "inputs": [[]], "outputs": [1]}),
    ],
)
def test_usual_names_are_no_solution(program: str, truth: dict[str, object], plainly: list[Limits]) -> None:
    assert score(program, **truth)["score"] == 0.0


@pytest.mark.parametrize(
    ("given", "output"), [([5], "101"), ([5], ["101"]), ("5\n", '"101"'), ("5\n", '["101"]'), ("[5]\n", '"101"')]
)
def test_digits_that_are_expected_as_a_text_are_no_number(given: object, output: object, plainly: list[Limits]) -> None:
    truth = {"fn_name": "to_binary", "inputs": [given], "outputs": [output]}
    digits = "bin(n if isinstance(n, int) else n[0])[2:]"
    assert score(f"def to_binary(n):\n    return {digits}", **truth)["score"] == 1.0
    assert score(f"def to_binary(n):\n    return int({digits})", **truth)["score"] == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [("101", 101), ("true", True), ("null", None), ("[1]", [1]), ("1.5", 1.5), ('"a"', "a"), ('{"a": 1}', {"a": 1})],
)
def test_beside_arguments_in_a_list_a_text_is_a_text_and_in_a_text_it_is_json(
    text: str, value: object, plainly: list[Limits]
) -> None:
    in_list = {"fn_name": "f", "inputs": [[]], "outputs": [text]}
    in_text = {"fn_name": "f", "inputs": [""], "outputs": [text]}
    for result, truth, passes in (
        (text, in_list, True),
        (value, in_list, False),
        (text, in_text, False),
        (value, in_text, True),
    ):
        assert score(f"def f():\n    return {result!r}", **truth)["score"] == float(passes), (result, truth)


def test_each_test_of_a_function_has_its_own_form(plainly: list[Limits]) -> None:
    truth = {"fn_name": "f", "inputs": [["7"], '"7"', '"x"'], "outputs": ["7", '"7"', "x"]}
    assert score("def f(text):\n    return text", **truth)["score"] == 1.0
    assert score("def f(text):\n    return 7 if text == '7' else text", **truth)["score"] == 0.0


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
        check_reward("rollout.rewards.code.compute_score", timeout_s=120, cpu_s=120)
    check_reward("rollout.rewards.exact.compute_score", timeout_s=10, cpu_s=10)


def test_a_time_limit_at_which_endless_loops_would_go_unscored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "isolation_problem", lambda: "")
    with pytest.raises(ValueError, match=r"`reward\.timeout_s` = 10: .* 60 s.*; set it to 120"):
        check_reward("rollout.rewards.code.compute_score", timeout_s=10, cpu_s=120)
    check_reward("rollout.rewards.code.compute_score", timeout_s=120, cpu_s=120)


def test_a_cpu_limit_at_which_endless_loops_would_go_unscored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "isolation_problem", lambda: "")
    with pytest.raises(ValueError, match=r"`reward\.cpu_s` = 30: .* 60 CPU seconds .* at least 90, .*; set it to 120"):
        check_reward("rollout.rewards.code.compute_score", timeout_s=120, cpu_s=30)
    check_reward("rollout.rewards.code.compute_score", timeout_s=120, cpu_s=90)


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


def test_tests_of_a_response_share_their_cpu_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run(source: str, *, stdin: str, limits: Limits) -> Outcome:
        del source
        given.append(limits.total_cpu_s)
        return Outcome(ending=Ending.EXITED, code=0, output=stdin, cpu_s=25.0)

    monkeypatch.setattr(code, "run_program", run)
    score("print(input())", inputs=["1", "2", "3"], outputs=["1", "2", "3"])
    assert given == pytest.approx([60.0, 35.0, 10.0])


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
        (
            "def f(nums: List[int]):\n    return nums\nif __name__ == '__main__':\n    print(f(input()))",
            {"fn_name": "f", "inputs": [[[1]]], "outputs": [[1]]},
            True,
        ),
        ("print('a' * 3_000_000)", {"inputs": [""], "outputs": ["a" * 3_000_000]}, True),
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
