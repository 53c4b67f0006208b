r"""Exact or numeric match of a response's final answer with the ground truth: 1.0 or 0.0.

The final answer is the text after the *last* marker in the response: `\boxed{...}`, `####`, or `answer:` / `answer is`
(any case), up to the end of its line. Without a marker it is the last number; without a number the response is wrong.
The ground truth is read in the same way if it holds a marker (as GSM8K's solutions do), and verbatim otherwise.

If the ground truth is a number, the answer must have its value, to one part in 10^6: `1,000`, `$1000` and `1000.0` are
equal, and so are `2/4` and `0.5`. A percent sign is ignored. In an answer with words (`42 apples`) the last number
counts. Otherwise both texts must be equal apart from case, spaces and surrounding punctuation.
"""

import math
import re

_MARKERS = re.compile(r"####|answer\s*(?:is\b\s*:?|:)|\\boxed\s*\{", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?(?:\s*/\s*\d+)?", re.IGNORECASE)
_TOLERANCE = 1e-6


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 for the right final answer, else 0.0; `parsed` 1.0 if the response has a final answer."""
    answer = final_answer(solution_str)
    right = answer is not None and same_answer(answer, _after_last_marker(ground_truth) or ground_truth)
    return {"score": float(right), "parsed": float(answer is not None)}


def final_answer(text: str) -> str | None:
    """The final answer of a response; None if nothing follows its last marker, or it has no marker and no number."""
    marked = _after_last_marker(text)
    if marked is not None:
        return marked or None
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same_answer(answer: str, truth: str) -> bool:
    """Whether an answer equals the ground truth: by value if the ground truth is a number, else as text."""
    expected = as_number(truth)
    if expected is None:
        return _normal(answer) == _normal(truth) != ""
    numbers = _NUMBER.findall(answer)
    value = as_number(answer) if as_number(answer) is not None else as_number(numbers[-1]) if numbers else None
    return value is not None and math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def as_number(text: str) -> float | None:
    """The value of a text that is a single number, with thousands commas, a fraction, a currency or a percent sign."""
    plain = text.strip(" \t\n$€£*%").rstrip(".").rstrip("%*")
    if not _NUMBER.fullmatch(plain):
        return None
    numerator, _, denominator = plain.replace(",", "").partition("/")
    divisor = float(denominator or 1)
    return float(numerator) / divisor if divisor else None


def _after_last_marker(text: str) -> str | None:
    """The text after the last marker; None without a marker, empty if nothing follows it."""
    markers = list(_MARKERS.finditer(text))
    if not markers:
        return None
    rest = text[markers[-1].end() :]
    if markers[-1].group().endswith("{"):
        return _braced(rest).strip()
    return rest.strip().split("\n", 1)[0].strip()


def _braced(text: str) -> str:
    """The text up to the closing brace of the marker; empty if the brace is missing."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:index]
    return ""


def _normal(text: str) -> str:
    return " ".join(text.casefold().strip(" .,;:!?*$\"'`").split())
