"""Exact or numeric match of a response's final answer with the ground truth: 1.0 or 0.0.

The final answer is the text after the *last* marker in the response: `\boxed{...}`, `####`, or `answer:` / `answer is`
(any case), up to the end of its line. Without a marker it is the last number; without a number the response is wrong.
The ground truth is read the same way if it holds a marker (GSM8K's solutions do), and as it is otherwise.

Two answers are equal when both are numbers of equal value (`1,000`, `$1000`, `1000.0` and `2/4`, `0.5` are; a
tolerance of one part in 10^6), or when they are the same text apart from case, surrounding punctuation and spaces.
"""

import math
import re

_MARKERS = re.compile(r"####|answer\s*(?:is\b\s*:?|:)|\\boxed\s*\{", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:\s*/\s*\d+)?%?|[-+]?\.\d+", re.IGNORECASE)
_TOLERANCE = 1e-6


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 for the right final answer, else 0.0; `parsed` 1.0 when a final answer was found at all."""
    answer = final_answer(solution_str)
    marked = _after_last_marker(ground_truth)
    truth = ground_truth if marked is None else marked
    right = answer is not None and same_answer(answer, truth)
    return {"score": float(right), "parsed": float(answer is not None)}


def final_answer(text: str) -> str | None:
    """The final answer of a response, None when it holds neither a marker nor a number."""
    marked = _after_last_marker(text)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same_answer(left: str, right: str) -> bool:
    """Whether two answers are equal as numbers or as text."""
    left_number, right_number = as_number(left), as_number(right)
    if left_number is not None and right_number is not None:
        return math.isclose(left_number, right_number, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return _normal(left) == _normal(right) != ""


def as_number(text: str) -> float | None:
    """The value of a text that is one number, with units of money, thousands commas, a fraction or percent."""
    plain = text.strip().strip("$€£ .*").replace(",", "")
    if not _NUMBER.fullmatch(plain):
        return None
    numerator, _, denominator = plain.rstrip("%").partition("/")
    if denominator and float(denominator) == 0:
        return None
    value = float(numerator) / float(denominator or 1)
    return value / 100 if plain.endswith("%") else value


def _after_last_marker(text: str) -> str | None:
    last = None
    for last in _MARKERS.finditer(text):
        pass
    if last is None:
        return None
    rest = text[last.end() :]
    found = _braced(rest) if last.group().endswith("{") else rest.strip().split("\n", 1)[0]
    return found.strip() or None


def _braced(text: str) -> str:
    """The text up to the brace that closes an opening one before it."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:index]
    return ""


def _normal(text: str) -> str:
    return " ".join(text.casefold().strip(" .,;:!?*$\"'`").split())
