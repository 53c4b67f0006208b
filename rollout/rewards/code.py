r"""Rewards a program in the response by its test cases: 1.0 if it passes all of them, else 0.0.

The program is the last fenced block of the response (three backticks, with or without `python`). It runs in
`rollout.rewards.sandbox`: once for each test with standard input, up to the first test that fails, and once for all
calls or assertions. Outputs are compared outside the sandbox, so that a program cannot read what is expected of it.

The ground truth is JSON, in the shapes of APPS, TACO and LiveCodeBench as verl's data has them:

* `{"inputs": ["1 2\n"], "outputs": ["3\n"]}`: standard input and expected standard output.
* `{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}`: arguments and expected result of a function, or of the
  method of a class `Solution`. Arguments may also be a text with one JSON value in each line.
* `{"assert_case": ["assert add(1, 2) == 3"]}`: statements that run after the program.

`extra_info` may hold `time_limit_s`, CPU seconds of a test, and `memory_limit_mb`. All tests of a response together
have `TOTAL_S` seconds; a response that needs more scores 0. `reward.timeout_s` must be longer, because a response that
meets it counts as not scored, and endless loops would go unpunished.

The program of an `assert_case` can read its tests, and the mark that ends them, in its own file. It does not pass by
ending early alone. Prefer the other two shapes where a policy might learn to cheat.
"""

import json
import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollout.rewards.sandbox import Ending, Limits, Outcome, isolation_problem, run_program

_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TOLERANCE = 1e-6
TOTAL_S = 60.0
"""Wall seconds of all tests of a response."""
_WALL_PER_CPU = 2.0
"""Wall seconds of a test over its CPU seconds, so that other processes of the node do not make it late."""

_CALL = """
import json as _json, sys as _sys
_function = globals().get({name!r}) or getattr(Solution(), {name!r})
_results = [_function(*_arguments) for _arguments in _json.loads({arguments!r})]
_results = [list(_result) if isinstance(_result, tuple) else _result for _result in _results]
_sys.stdout.write("\\n" + {mark!r} + _json.dumps(_results))
"""
_ASSERT = """
{statements}
print("\\n" + {mark!r})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """One test of a program."""

    program: str
    stdin: str = ""
    cases: int = 1
    """Cases that this program runs; its time limit is that of all of them."""
    mark: str = ""
    """Text that stands before the result in the output; empty if the whole output is the result."""
    expected: object = None
    """Text of the whole output, JSON values of the results, or None if the mark is enough."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 if all tests pass; `has_program` and `timed_out` (a test met its time limit) are 0.0 or 1.0.

    Raises:
        ValueError: the ground truth has none of the shapes above.
    """
    program = last_program(solution_str)
    tests = list(_tests(program or "", ground_truth))
    if program is None:
        return {"score": 0.0, "has_program": 0.0, "timed_out": 0.0}
    deadline = time.monotonic() + TOTAL_S
    for test in tests:
        limits = _limits(extra_info, test.cases, left_s=deadline - time.monotonic())
        outcome = run_program(test.program, stdin=test.stdin, limits=limits)
        if not _passes(test, outcome):
            timed_out = outcome.ending is Ending.TIMEOUT
            return {"score": 0.0, "has_program": 1.0, "timed_out": float(timed_out)}
    return {"score": 1.0, "has_program": 1.0, "timed_out": 0.0}


def check_settings(timeout_s: float) -> None:
    """Called once before the first response is scored, with `reward.timeout_s`.

    Raises:
        ValueError: the time limit is too short, or nothing isolates programs on this machine.
    """
    if timeout_s <= TOTAL_S:
        raise ValueError(
            f"`reward.timeout_s` = {timeout_s}: {__name__} gives the tests of a response {TOTAL_S:.0f} s, and a "
            f"response that meets the time limit would not be scored at all; set it to {2 * TOTAL_S:.0f}"
        )
    if problem := isolation_problem():
        raise ValueError(f"{__name__}: {problem}")


def last_program(text: str) -> str | None:
    """The last fenced block of a response; None without one."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else None


def _limits(extra_info: object, num_cases: int, *, left_s: float) -> Limits:
    given = extra_info if isinstance(extra_info, Mapping) else {}
    cpu_s = math.ceil(num_cases * float(given.get("time_limit_s", Limits().cpu_s)))
    memory_bytes = int(float(given.get("memory_limit_mb", Limits().memory_bytes >> 20))) << 20
    return Limits(cpu_s=cpu_s, wall_s=max(0.0, min(_WALL_PER_CPU * cpu_s, left_s)), memory_bytes=memory_bytes)


def _tests(program: str, ground_truth: str) -> Iterator[_Test]:
    truth = _parsed(ground_truth)
    mark = secrets.token_hex(8)
    statements = truth.get("assert_case")
    if isinstance(statements, list):
        source = program + _ASSERT.format(statements="\n".join(map(str, statements)), mark=mark)
        yield _Test(program=source, cases=len(statements), mark=mark)
        return
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"ground truth {ground_truth!r:.200} has neither `assert_case` nor `inputs` and `outputs` of one length"
        )
    if name := truth.get("fn_name"):
        arguments = json.dumps([_arguments(given) for given in inputs])
        source = program + _CALL.format(name=name, arguments=arguments, mark=mark)
        yield _Test(program=source, cases=len(inputs), mark=mark, expected=[_value(output) for output in outputs])
        return
    for given, expected in zip(inputs, outputs, strict=True):
        yield _Test(program=program, stdin=_text(given), expected=_text(expected))


def _parsed(ground_truth: str) -> Mapping[str, object]:
    try:
        truth = json.loads(ground_truth)
    except json.JSONDecodeError as error:
        raise ValueError(f"ground truth {ground_truth!r:.200} is not JSON: {error}") from error
    if not isinstance(truth, dict):
        raise ValueError(f"ground truth {ground_truth!r:.200} is no JSON object")
    return truth


def _arguments(given: object) -> list[object]:
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return list(given) if isinstance(given, list) else [given]


def _value(expected: object) -> object:
    if not isinstance(expected, str):
        return expected
    try:
        return json.loads(expected)
    except json.JSONDecodeError:
        return expected


def _text(given: object) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _passes(test: _Test, outcome: Outcome) -> bool:
    if outcome.ending is not Ending.EXITED or outcome.code != 0:
        return False
    if not test.mark:
        return _same_output(outcome.output, str(test.expected))
    _, found, result = outcome.output.rpartition(test.mark)
    if not found:
        return False
    if test.expected is None:
        return True
    results, expected = _value(result), test.expected
    assert isinstance(expected, list)
    return isinstance(results, list) and len(results) == len(expected) and all(map(_same_value, results, expected))


def _same_value(result: object, expected: object) -> bool:
    """Whether a result is the expected value; data sets also wrap a value into a list of one."""
    return result == expected or (isinstance(expected, list) and len(expected) == 1 and result == expected[0])


def _same_output(output: str, expected: str) -> bool:
    """Whether two outputs have the same words; words that are decimal numbers may differ by one part in 10^6."""
    words, others = output.split(), expected.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(word: str, other: str) -> bool:
    if word == other:
        return True
    try:
        return "." in word + other and math.isclose(float(word), float(other), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False
