r"""Mathematical equality by `math-verify` (LaTeX and plain expressions, sets, intervals): 1.0 or 0.0.

The answer is the last `\boxed{...}` of the response, or what follows a later `final answer is`. Without both it is what
follows `Answer:`, else a value right behind `answer is`, else the last formula between dollars or the last number,
whichever stands later. Boxes that stand close together are compared as a set, and the last of them also alone: a
response may correct itself.

The ground truth is LaTeX without a frame, as in MATH and DAPO (`2\pi`, `34`), or a text that frames it (`$2\pi$`,
`\boxed{34}`), or words with a number (`18 dollars`). Of a solution in GSM8K only what follows the last `####` counts. A
bare ground truth is framed before it is read: else math-verify would take the first number of `2\pi` for all of it.

math-verify takes every `answer` for a mark, also in `the possible answers are 12 and 15` and `he answered 45`. So only
real marks keep that word. It also takes the asterisks of a bold `**12**` for signs of a product, so they are removed.

The library's time limits use signals and threads and are off here: the scorer's limit (`reward.timeout_s`) already
kills a comparison that takes too long. An answer whose digits would fill a page (`9^{9^9}`) is wrong without a
comparison.
"""

import math
import re

_BOX = r"\boxed"
_FRAMES = ("$", _BOX, r"\(", r"\[")
_SOLUTION_END = "####"
_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_FUNCTIONS = re.compile(r"sqrt|(?:arc)?(?:sinh?|cosh?|tanh?)|frac|binom")
_WORD = re.compile(r"[A-Za-z]{4,}")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
_MOST_DIGITS = 1e4
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)([^*\n]++)(?<=\S)\*\*")
"""Of Markdown; `2**3` is a power."""
_IS_VALUE = (
    r"is(?:[\W_]+(?:therefore|thus|hence|then|simply|just|exactly|approximately|about))?"
    r"[\W_]*?[\d$\\\[]"
)
"""Only these words and signs may stand between `is` and a value."""
_ANSWER = re.compile(
    r"(?:final )?answer[\s*_]*+(?P<colon>:)"
    rf"|(?P<mark>(?:final answer[^.:\n]{{0,100}}?\s|answer\s+){_IS_VALUE})"
    r"|(?:final )?answer",
    re.IGNORECASE,
)
"""The word before a colon, as a mark before a value, or alone."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 if the final answer equals the ground truth, else 0.0; `parsed` 1.0 if the response has an answer.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    from math_verify import verify

    answers = [_parsed(solution_str)]
    last_box = solution_str.rfind(_BOX)
    if solution_str.find(_BOX) < last_box:
        answers.append(_parsed(solution_str[last_box:]))
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
    answer = ground_truth.rpartition(_SOLUTION_END)[2].strip()
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", answer)
    framed = f"\\boxed{{{text}}}"
    has_frame = any(frame in text for frame in _FRAMES)
    has_words = _WORD.search(_FUNCTIONS.sub("", _COMMANDS.sub("", text))) is not None
    order = (answer, framed) if has_frame or has_words else (framed, answer)
    return next((found for each in order if (found := _parsed(each))), [])


def _parsed(text: str) -> list[object]:
    """math-verify's list of an expression and its text; empty if the text has no answer."""
    from math_verify import parse

    return list(parse(_ANSWER.sub(_kept, _BOLD.sub(r"\1", text)), parsing_timeout=None))


def _kept(found: re.Match[str]) -> str:
    """A mark in the form that math-verify knows; a neutral word for any other `answer`."""
    return "answer: " if found["colon"] else found["mark"] or "result"


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
