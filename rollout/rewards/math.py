r"""Mathematical equality by `math-verify` (LaTeX and plain expressions, sets, intervals): 1.0 or 0.0.

The answer is the last `\boxed{...}` of the response, or what follows a later `final answer is`. Without both it is what
follows `Answer:`, else the last formula between dollars or the last number, whichever stands later. Boxes that stand
close together are compared as a set, and the last of them also alone: a response may correct itself.

The ground truth is LaTeX without a frame, as in MATH and DAPO (`2\pi`, `34`), or a text that frames it (`$2\pi$`,
`\boxed{34}`, GSM8K's `#### 72`), or words with a number (`18 dollars`). A bare ground truth is framed before it is
read: else math-verify would take the first number of `2\pi` for all of it.

The library's time limits use signals and threads and are off here: the scorer's limit (`reward.timeout_s`) already
kills a comparison that takes too long. An answer whose digits would fill a page (`9^{9^9}`) is wrong without a
comparison.
"""

import math
import re

_BOX = r"\boxed"
_FRAMES = ("$", _BOX, r"\(", r"\[", "####")
_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_FUNCTIONS = re.compile(r"sqrt|(?:arc)?(?:sinh?|cosh?|tanh?)|frac|binom")
_WORD = re.compile(r"[A-Za-z]{4,}")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
_MOST_DIGITS = 1e4


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 if the final answer equals the ground truth, else 0.0; `parsed` 1.0 if the response has an answer.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    from math_verify import parse, verify

    answers = [parse(solution_str, parsing_timeout=None)]
    last_box = solution_str.rfind(_BOX)
    if solution_str.find(_BOX) < last_box:
        answers.append(parse(solution_str[last_box:], parsing_timeout=None))
    truth = parsed_truth(ground_truth)
    if not truth:
        raise ValueError(f"ground truth {ground_truth!r} cannot be parsed as mathematics")
    most_digits = max(_MOST_DIGITS, _num_digits(truth[0]))
    right = any(
        bool(answer)
        and all(_num_digits(part) <= most_digits for part in answer)
        and bool(verify(truth, answer, timeout_seconds=None))
        for answer in answers
    )
    return {"score": float(right), "parsed": float(any(answers))}


def parsed_truth(ground_truth: str) -> list[object]:
    """The ground truth as math-verify's list of an expression and its text; empty if it cannot be parsed."""
    from math_verify import parse

    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", ground_truth.strip())
    framed = f"\\boxed{{{text}}}"
    has_frame = any(frame in text for frame in _FRAMES)
    has_words = _WORD.search(_FUNCTIONS.sub("", _COMMANDS.sub("", text))) is not None
    order = (ground_truth, framed) if has_frame or has_words else (framed, ground_truth)
    return next((found for each in order if (found := list(parse(each, parsing_timeout=None)))), [])


def _num_digits(expression: object) -> float:
    """Upper bound of the decimal digits of an expression's numbers, once computed; 0 for other objects."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return 0.0
    if isinstance(expression, sympy.Integer):
        return abs(int(expression)).bit_length() * math.log10(2)
    parts = [_num_digits(part) for part in expression.args]
    if isinstance(expression, sympy.Pow):
        base, exponent = parts
        return max(base, 1.0) * _value(exponent) if exponent else base
    if isinstance(expression, sympy.factorial):
        return _value(parts[0]) * max(parts[0], 1.0)
    return sum(parts)


def _value(num_digits: float) -> float:
    """A number of so many digits."""
    return 10.0**num_digits if num_digits < 300 else math.inf
