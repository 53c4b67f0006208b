r"""Rewards a program in the response by its test cases: 1.0 if it passes all of them, else 0.0.

The program is the last fenced block of the response (three backticks) that names Python or no language. It runs in
`rollout.rewards.sandbox`: once for each test with standard input, up to the first test that fails, and once for all
calls or assertions. Outputs are compared outside the sandbox, so that a program cannot read what is expected of it.

As in LiveCodeBench's grader, a program need not import the usual names (`List`, `math`, `deque`, ...), and its part
under `if __name__ == "__main__"` runs for standard input only. Decimal numbers may differ by one part in 10^6.

The ground truth is JSON, in the shapes of APPS, TACO and LiveCodeBench as verl's data has them:

* `{"inputs": ["1 2\n"], "outputs": ["3\n"]}`: standard input and expected standard output.
* `{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}`: arguments and expected result of a function, or of the
  method of a class `Solution`. APPS and TACO have values: the output `"101"` is a text. LiveCodeBench has JSON in
  texts: in `{"inputs": ["1\n2"], "outputs": ["3"]}` each line is an argument, and the output is a number.
* `{"assert_case": ["assert add(1, 2) == 3"]}`: statements that run after the program.

`extra_info` may hold `time_limit_s`, CPU seconds of a test, and `memory_limit_mb`. All tests of a response together
have `TOTAL_S` seconds, and all their processes together have `TOTAL_CPU_S` CPU seconds; a response that needs more
scores 0. `reward.timeout_s` and `reward.cpu_s` must be higher. A response that meets one of them counts as not scored,
so endless loops would go unpunished.

The program of an `assert_case` can read its tests, and the mark that ends them, in its own file. It does not pass by
ending early alone. Prefer the other two shapes where a policy might learn to cheat.
"""

import builtins
import importlib
import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeGuard

from rollout.rewards.sandbox import Ending, Limits, Outcome, isolation_problem, run_program

_FENCE = re.compile(r"^((?:(?!```).)*)`{3,}+([ \t]*+[^\s`]*+)([^`\n]*+)$", re.MULTILINE)
"""A line with one fence: what stands before the fence, the language, what stands after both.

Only single characters are repeated possessively: before 3.11.5, Python matches a possessive group wrongly.
"""
_LANGUAGES = ("", "py", "python", "python3")
_TOLERANCE = 1e-6
TOTAL_S = 60.0
"""Wall seconds of all tests of a response, as the sandbox counts them (`Limits.wall_s`)."""
TOTAL_CPU_S = 60.0
"""CPU seconds of all tests of a response, over all processes. A program of one process meets `TOTAL_S` first."""
_SPARE_CPU_S = 30.0
"""What the processes of a program may use beyond that before they are ended, with the work of the reward itself."""
_WALL_PER_CPU = 2.0
"""Wall seconds of a test over its CPU seconds, so that other processes of the node do not make it late."""

_MODULES = (
    *("collections", "math", "heapq", "bisect", "itertools", "functools", "operator", "re", "string", "random", "copy"),
    *("datetime", "statistics", "json", "io", "sys", "typing"),
)
"""Modules that a program need not import, nor their public names; of two equal names the first one counts."""

_RUN = """
import sys as _sys
exec({imports!r}, vars(_sys.modules["builtins"]))
__name__ = {name!r}
_sys.modules.setdefault(__name__, _sys.modules["__main__"])
exec(compile({program!r}, "program", "exec", dont_inherit=True))
"""
"""Usual names become built-in ones, so that they hide nothing. The program is compiled apart from this text, so that
it keeps its line numbers and may begin with `from __future__`."""
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
_SPARE_BYTES = 64 << 10
"""Output that a program may write beyond twice what is expected."""


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

    @property
    def output_bytes(self) -> int:
        """Limit of the output, which must hold what is expected."""
        text = self.expected if isinstance(self.expected, str) else json.dumps(self.expected)
        return max(Limits().output_bytes, 2 * len(text.encode("utf-8", "surrogatepass")) + _SPARE_BYTES)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 if all tests pass; `has_program` and `timed_out` (a test met its time limit) are 0.0 or 1.0.

    Raises:
        ValueError: the ground truth has none of the shapes above.
    """
    program = last_program(solution_str)
    tests = list(_tests(program or "", ground_truth))
    if program is None:
        return {"score": 0.0, "has_program": 0.0, "timed_out": 0.0}
    left_s, left_cpu_s = TOTAL_S, TOTAL_CPU_S
    for test in tests:
        limits = _limits(extra_info, test, left_s=left_s, left_cpu_s=left_cpu_s)
        outcome = run_program(test.program, stdin=test.stdin, limits=limits)
        left_s -= outcome.wall_s
        left_cpu_s -= outcome.cpu_s
        if not _passes(test, outcome):
            timed_out = outcome.ending is Ending.TIMEOUT
            return {"score": 0.0, "has_program": 1.0, "timed_out": float(timed_out)}
    return {"score": 1.0, "has_program": 1.0, "timed_out": 0.0}


def check_settings(timeout_s: float, cpu_s: float) -> None:
    """Called once before the first response is scored, with `reward.timeout_s` and `reward.cpu_s`.

    Raises:
        ValueError: a limit is too low, or nothing isolates programs on this machine.
    """
    if timeout_s <= TOTAL_S:
        raise ValueError(
            f"`reward.timeout_s` = {timeout_s}: {__name__} gives the tests of a response {TOTAL_S:.0f} s, and a "
            f"response that meets the time limit would not be scored at all; set it to {2 * TOTAL_S:.0f}"
        )
    if cpu_s < TOTAL_CPU_S + _SPARE_CPU_S:
        raise ValueError(
            f"`reward.cpu_s` = {cpu_s}: {__name__} gives the tests of a response {TOTAL_CPU_S:.0f} CPU seconds and "
            f"needs a limit of at least {TOTAL_CPU_S + _SPARE_CPU_S:.0f}, because a response that meets it would not "
            f"be scored at all; set it to {2 * TOTAL_CPU_S:.0f}"
        )
    if problem := isolation_problem():
        raise ValueError(f"{__name__}: {problem}")


def last_program(text: str) -> str | None:
    """The last fenced block of a response in Python or in no named language; None without one.

    A block that a cut response leaves open is none.
    """
    program, begin, language = None, -1, ""
    for fence in _FENCE.finditer(text):
        before, word, after = fence[1].strip(), fence[2].strip().lower(), fence[3].strip()
        if before and (after or word not in _LANGUAGES):  # backticks amid a sentence
            continue
        if begin >= 0 and before and word:  # a text inside the program
            continue
        if begin >= 0:
            program = text[begin : fence.end(1)] if language in _LANGUAGES else program
        # a language also opens a block whose forerunner was not closed; a space makes it the sentence that goes on
        opens = begin < 0 or (word and not after and not fence[2][0].isspace())
        begin, language = (fence.end() + 1, word) if opens else (-1, "")
    return program


def _limits(extra_info: object, test: _Test, *, left_s: float, left_cpu_s: float) -> Limits:
    given = extra_info if isinstance(extra_info, Mapping) else {}
    cpu_s = math.ceil(test.cases * float(given.get("time_limit_s", Limits().cpu_s)))
    memory_bytes = int(float(given.get("memory_limit_mb", Limits().memory_bytes >> 20))) << 20
    return Limits(
        cpu_s=cpu_s,
        wall_s=max(0.0, min(_WALL_PER_CPU * cpu_s, left_s)),
        total_cpu_s=left_cpu_s,
        memory_bytes=memory_bytes,
        output_bytes=test.output_bytes,
    )


def _tests(program: str, ground_truth: str) -> Iterator[_Test]:
    truth = _parsed(ground_truth)
    mark = secrets.token_hex(8)
    statements = truth.get("assert_case")
    if isinstance(statements, list):
        lines = "\n".join(map(str, statements))
        source = _runnable(program, also=lines) + _ASSERT.format(statements=lines, mark=mark)
        yield _Test(program=source, cases=len(statements), mark=mark)
        return
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"ground truth {ground_truth!r:.200} has neither `assert_case` nor `inputs` and `outputs` of one length"
        )
    if name := truth.get("fn_name"):
        arguments = json.dumps([_arguments(given) for given in inputs])
        source = _runnable(program) + _CALL.format(name=name, arguments=arguments, mark=mark)
        results = [_result(given, output) for given, output in zip(inputs, outputs, strict=True)]
        yield _Test(program=source, cases=len(inputs), mark=mark, expected=results)
        return
    source = _runnable(program, name="__main__")
    for given, expected in zip(inputs, outputs, strict=True):
        yield _Test(program=source, stdin=_text(given), expected=_text(expected))


def _runnable(program: str, *, name: str = "program", also: str = "") -> str:
    """The program with the usual names that it, or the text `also`, may mean; `name` is its `__name__`."""
    words = sorted(set(re.findall(r"[^\W\d]\w*", program + "\n" + also)))
    usual = _usual_imports()
    imports = "\n".join(usual[word] for word in words if word in usual)
    return _RUN.format(imports=imports, name=name, program=program)


@cache
def _usual_imports() -> dict[str, str]:
    """The import of each usual name. Only those that a program needs run, because each costs time in each test."""
    imports = {name: f"import {name}" for name in _MODULES}
    for module in _MODULES:
        names = vars(importlib.import_module(module))
        for name in names.get("__all__") or [name for name in names if not name.startswith("_")]:
            if not hasattr(builtins, name):
                imports.setdefault(name, f"from {module} import {name}")
    return imports


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


def _result(given: object, expected: object) -> object:
    """The expected result. It is read as JSON only beside arguments in a text; else `"101"` would become a number."""
    return _value(expected) if isinstance(given, str) and isinstance(expected, str) else expected


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # not JSON, a number of too many digits, lists in too many lists
        return text


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
    return _equal(result, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _equal(result, expected[0])
    )


def _equal(result: object, expected: object) -> bool:
    """Equality of JSON values, in which decimal numbers may differ by one part in 10^6."""
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(_equal, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_equal(result[key], expected[key]) for key in expected)
    if result == expected:
        return True
    if not (_is_number(result) and _is_number(expected) and (isinstance(result, float) or isinstance(expected, float))):
        return False
    try:
        return _close(float(result), float(expected))
    except OverflowError:  # a whole number that no decimal number comes near
        return False


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_output(output: str, expected: str) -> bool:
    """Whether two outputs have the same words; words that are decimal numbers may differ by one part in 10^6."""
    words, others = output.split(), expected.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(word: str, other: str) -> bool:
    if word == other:
        return True
    try:
        return "." in word + other and _close(float(word), float(other))
    except ValueError:
        return False


def _close(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
