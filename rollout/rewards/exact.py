r"""Exact or numeric match of a response's final answer with the ground truth: 1.0 or 0.0.

The final answer stands in the last `\boxed{...}`, or after the last `####` whose line is a number. Without these it is
the text after the last marker, `####` or `answer:` / `answer is` (any case), up to the end of its line: a sentence like
"This answer is consistent" after a box is none. Without a marker it is the last number; without a number the response
is wrong. The ground truth is read in the same way if it holds a marker (as GSM8K's solutions do), and verbatim
otherwise.

If the ground truth is a number, the answer must have its value, to one part in 10^6: `1,000`, `$1000` and `1000.0` are
equal, and so are `2/4`, `\frac{2}{4}` and `0.5`. A percent sign is ignored. In an answer with words (`42 apples`,
`5 \text{ cm}^2`) its number counts, if it has one alone. Of an equation (`x = 7`, `3 + 4 = 7`) the right side counts.
A formula (`\sqrt{2}`, `(3,5)`, `2x`) has no value here; `rollout.rewards.math` reads them. If the ground truth is no
number, both texts must be equal apart from case, spaces and surrounding punctuation.
"""

import math
import re

_MARKERS = re.compile(r"####|answer\s*(?:is\b\s*:?|:)|\\boxed\s*\{(?P<full>(?!\s*\}))?", re.IGNORECASE)
_LINE = re.compile(r"\s*([^\n]*)")
_SHORT_LINE = re.compile(r"\s*([^\n#]{1,100})(?:\n|$)")
_NUMBER = re.compile(
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?(?:\s*/\s*\d+)?", re.IGNORECASE
)
_TOLERANCE = 1e-6

_TEXT = r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{(?!\s*[dei]\s*\})"
_PLAIN = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (_TEXT + r"([^{}\d]*)\}\s*\^\s*(?:[23]|\{[23]\})", r" \1 "),  # a unit, with its power
        (_TEXT + r"([^{}]*)\}", r" \1 "),
        (r"(?<=m)(?:[²³]|\^[23]|\^\{[23]\})", ""),  # square metres
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", " "),
        (r"(?<!\d)\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1/\2"),
        (r"\\!|\*\*|`", ""),
        (r"\{,\}|\\,(?=\d{3}(?!\d))", ","),
        (r"\\[()\[\],;: ]|~", " "),
        (r"\\([$%])", r"\1"),
        ("\N{MINUS SIGN}", "-"),
    )
)
"""What of LaTeX and Markdown is only dress, and what it becomes."""
_EQUATION = re.compile(r"(?:[^\W\d]\w*\s*|(?:[\d\s.,+\-*/×÷()$=]|\\times|\\cdot|\\div)*)=([^=]+)")
"""A name or sums of numbers, and the right side."""
_FORMULA = re.compile(r"[\\^_(){}\[\]+*=<>|√π∞×÷·±≤≥≠²³]|/(?![A-Za-z])|-(?![A-Za-z]{2})|\b(?:pi|sqrt)\b")
"""Signs of a formula; `km/h` and `year-long` have none."""
_LETTER_BEFORE, _LETTER_AFTER = re.compile(r"(?<![A-Za-z])[A-Za-z]$"), re.compile(r"/?[A-Za-z](?![A-Za-z])")
"""A variable that touches the number."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 for the right final answer, else 0.0; `parsed` 1.0 if the response has a final answer."""
    answer = final_answer(solution_str)
    right = answer is not None and same_answer(answer, _marked(ground_truth) or ground_truth)
    return {"score": float(right), "parsed": float(answer is not None)}


def final_answer(text: str) -> str | None:
    """The final answer of a response; None if nothing follows its marker, or it has no marker and no number."""
    marked = _marked(text)
    if marked is not None:
        return marked or None
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same_answer(answer: str, truth: str) -> bool:
    """Whether an answer equals the ground truth: by value if the ground truth is a number, else as text."""
    expected = as_number(truth)
    if expected is None:
        return _normal(answer) == _normal(truth) != ""
    value = _value(_plain(answer))
    return value is not None and math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def as_number(text: str) -> float | None:
    """The value of a text that is a single number, with thousands commas, a fraction, a currency or a percent sign."""
    plain = _plain(text).strip(" \t\n$€£*%").rstrip(".").rstrip(" $%*")
    if not _NUMBER.fullmatch(plain):
        return None
    numerator, _, denominator = plain.replace(",", "").partition("/")
    divisor = float(denominator or 1)
    return float(numerator) / divisor if divisor else None


def _value(text: str) -> float | None:
    """The value of a plain text: of the right side of an equation, and of the only number among words."""
    equation = _EQUATION.fullmatch(text.strip(" $"))
    side = equation[1] if equation else text
    value = as_number(side)
    numbers = list(_NUMBER.finditer(side))
    if value is not None or len(numbers) != 1:
        return value
    before, after = side[: numbers[0].start()], side[numbers[0].end() :]
    is_formula = _FORMULA.search(before + " " + after) or _LETTER_BEFORE.search(before) or _LETTER_AFTER.match(after)
    return None if is_formula else as_number(numbers[0].group())


def _marked(text: str) -> str | None:
    """The text that the deciding marker marks; None without a marker, empty if nothing follows it."""
    markers = list(_MARKERS.finditer(text))
    if not markers:
        return None
    return _after(text, next((one for one in reversed(markers) if _is_sure(text, one)), markers[-1]))


def _is_sure(text: str, marker: re.Match[str]) -> bool:
    """Whether a marker is no part of a sentence or a heading: a box that is not empty, and `####` with a number."""
    if marker.group() != "####":
        return marker["full"] is not None
    line = _SHORT_LINE.match(text, marker.end())
    return line is not None and as_number(line[1]) is not None


def _after(text: str, marker: re.Match[str]) -> str:
    if marker.group().endswith("{"):
        return _braced(text[marker.end() :]).strip()
    line = _LINE.match(text, marker.end())
    return line[1].strip() if line else ""


def _braced(text: str) -> str:
    """The text up to the closing brace of the marker; empty if the brace is missing."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:index]
    return ""


def _plain(text: str) -> str:
    """The text without what LaTeX and Markdown only dress it with."""
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text


def _normal(text: str) -> str:
    return re.sub(r"\s*,\s*", ",", " ".join(text.casefold().strip(" .,;:!?*$\"'`").split()))
