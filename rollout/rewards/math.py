r"""Mathematical equality by `math-verify` (LaTeX and plain expressions, sets, intervals): 1.0 or 0.0.

The answer is the last `\boxed{...}` of the response, or what follows a later `final answer is`. Without both it is what
follows `Answer:`, else a value right behind `answer is`, else the last formula between dollars or the last number,
whichever stands later. Boxes that stand close together are compared as a set, and the last of them also alone: a
response may correct itself.

The ground truth is LaTeX without a frame, as in MATH and DAPO (`2\pi`, `34`), or a text that frames it (`$2\pi$`,
`\boxed{34}`), or words with a number (`18 dollars`). Of a solution in GSM8K only what follows the last `####` counts. A
bare ground truth is framed before it is read: else math-verify would take the first number of `2\pi` for all of it.
A JSON list of one text is that text. Longer lists of texts, objects, and words with several numbers are refused. So
are rows that math-verify does not read as a matrix (`\begin{cases}`, `\begin{aligned}`, a table): it would take their
last number for all of them.

math-verify takes every `answer` for a mark, also in `the possible answers are 12 and 15` and `he answered 45`. So only
real marks keep that word. It also takes the asterisks of a bold `**12**` for signs of a product, so they are removed.
Behind a mark it takes the first number for all of `2\pi`. So a formula that fills the rest of the line, without a frame
or a word, is framed, too; one that begins with a letter only at the end of the response. What may be a value with a
unit, an exclamation or a decimal comma (`34 m`, `10!`, `1,5`) is right by either reading.

The library's time limits use signals and threads and are off here: the scorer's limit (`reward.timeout_s`) already
kills a comparison that takes too long. An answer whose digits would fill a page (`9^{9^9}`) is wrong without a
comparison.
"""

import json
import math
import re

LATE_SCORE = 0.0
"""Of a call over its time or CPU seconds: the final answer is too hard to compare, so it counts as wrong."""

_BOX = r"\boxed"
_FRAMES = ("$", _BOX, r"\(", r"\[")
_SOLUTION_END = "####"
_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_FUNCTIONS = re.compile(r"sqrt|(?:arc)?(?:sinh?|cosh?|tanh?)|frac|binom")
_WORD = re.compile(r"[A-Za-z]{4,}")
_NUMBER = re.compile(
    r"(?<![A-Za-z\d.,])\d[\d.,]*(?: \d{3}(?!\d))*(?::00)?(?:\s*[-+*/^=×÷{}()eE]+\s*\d[\d.,]*)*", re.ASCII
)
"""Of words: a number, or numbers that only signs connect."""
_ROWS = re.compile(r"\\begin\s*\{(?!vmatrix).*(?:\\\\|&(?!\s*=))", re.DOTALL)
"""An environment with several rows or columns, but no determinant; one row of `aligned` may stand at its sign."""
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
_MOST_DIGITS = 1e4
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)([^*\n]++)(?<=\S)\*\*")
"""Of Markdown; `2**3` is a power."""
_IS_VALUE = (
    r"is(?:[\W_]+(?:therefore|thus|hence|then|simply|just|exactly|approximately|about))?"
    r"(?P<value>[\W_]*?[\d$\\\[])"
)
"""Only these words and signs may stand between `is` and a value."""
_ANSWER = re.compile(
    r"(?:final )?answer[\s*_]*+(?P<colon>:)"
    rf"|(?P<mark>(?:final answer[^.:\n]{{0,100}}?\s|answer\s+){_IS_VALUE})"
    r"|(?:final )?answer",
    re.IGNORECASE,
)
"""The word before a colon, as a mark before a value, or alone."""
_ANSWER_IS = re.compile(r"answer\s++is[\s:*_]*+", re.IGNORECASE)

_MOST_CHARACTERS = 500
"""Of a formula behind a mark."""
_FORMULA = re.compile(r"[\w\s\\{}()\[\]+\-*/^=,.!|<>%:&π×−]+", re.ASCII)
_NO_FORMULA = re.compile(
    r"[A-Za-z]{2}"  # words
    r"|\d\.?\s+\d|^[^(\[]*\d,\d{3}(?!\d)|=\s*-?[\d,]*,\d{3}$"  # mixed numbers, numbered lines, thousands
    r"|\d\s*x\s*\d"  # a product
    r"|[\d}](?:\s+\(|\s*\[|\(\d+\)$)"  # a remark
    r"|</|<\||[-=]>|^[<>]|^[-+*]\s"  # tags, arrows, items of a list
    r"|^\(?[A-Za-z](?:\s*[).:]\s*[\w\\(-]|\s+-?(?:\d|\\\{\d))|\s\(?[A-Z]\)?$"  # the letter of a choice beside its value
)
"""In a formula whose commands are removed: signs that math-verify misreads inside a box."""
_CONNECTIVE = re.compile(
    r"\\(?:approx|simeq|sim|[pb]?mod|implies|iff|to|(?:[lL]ong)?(?:[lL]eft|[rR]ight)+arrow"
    r"|therefore|quad|qed|checkmark|(?:black)?square|Box)(?![A-Za-z])"
    r"|\\(?:text|mathrm|mbox)\s*\{[^{}]*[A-Za-z]{2}[^{}]*\}\s*\S"
)
"""Commands that join a value with another one or with words."""
_CHOICE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{\(?[A-Z]\)?\}(?:\\[ ,;]|\s|~)*\S")
"""The letter of a choice as a command, beside its value."""
_LAST_TEXT = re.compile(r"(?<=\S)\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")
"""A unit behind a value."""
_POWER = r"[A-Za-z](?:\^\{?\d\}?)?"
_PLAIN = r"[-+]?(?:[\d.][\d.,/^]*|\\[dt]?frac\{\d+\}\{\d+\})"
_ALSO_BARE = re.compile(
    rf"(?:[A-Za-z]\s*=\s*)?{_PLAIN}\s*(?:[A-Z]|!+|\\?%|\s+{_POWER}(?:/{_POWER})?|/[A-Za-z])"  # a unit or `!`
    r"|[-+]?\d+,\d+"  # a decimal comma
    rf"|{_PLAIN}\s*=.*"  # an equation with the value on its left
    r"|(?=[A-Za-z\s]*[^=A-Za-z\s])[^=]*([A-Za-z])[^=]*=[^,;=]*[,;]\s*\1\s*=.*"  # one that is solved: `5x = 10, x = 2`
    r"|\(?[A-Za-z]\)?|\\text\{.*\d.*\}",  # a name, words
    re.ASCII,
)
"""What may mean its number alone, or the last number of the response."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 if the final answer equals the ground truth, else 0.0; `parsed` 1.0 if the response has an answer.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    from math_verify import verify

    answers = _parsed_answers(solution_str)
    truth = parsed_truth(ground_truth)
    if not truth:
        raise ValueError(
            f"ground truth {ground_truth!r} cannot be parsed as mathematics; give one answer as text, such as `34` or "
            r"`\frac{1}{2}`"
        )
    most_digits = max(_MOST_DIGITS, _num_digits(truth[0]))
    right = any(
        bool(answer)
        and all(_num_digits(part) <= most_digits for part in answer)
        and bool(verify(truth, answer, timeout_seconds=None))
        for answer in answers
    )
    return {"score": float(right), "parsed": float(any(answers))}


def check_settings(timeout_s: float, cpu_s: float) -> None:
    """Import math-verify in the server of the workers, so that the first call of a worker does not wait for it.

    No limits are refused.
    """
    import math_verify  # noqa: F401


def parsed_truth(ground_truth: str) -> list[object]:
    """The ground truth as math-verify's list of an expression and its text; empty if it cannot be parsed."""
    answer = _one_answer(ground_truth.rpartition(_SOLUTION_END)[2].strip())
    has_frame = any(frame in answer for frame in _FRAMES)
    has_words = _WORD.search(_FUNCTIONS.sub("", _COMMANDS.sub("", answer))) is not None
    if has_words and not has_frame and not _marks(answer) and len(_NUMBER.findall(_COMMANDS.sub("*", answer))) > 1:
        return []
    bare = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", answer)
    order = (bare, _framed(answer)) if has_frame or has_words else (_framed(answer), bare)
    readings = (_parsed(each) for each in order)
    has_rows = _ROWS.search(answer) is not None
    return next((found for found in readings if found and (not has_rows or _has_matrix(found[0]))), [])


def _has_matrix(expression: object) -> bool:
    """Whether an expression is a matrix or has one, also a mutable one, which `Basic.has` does not find."""
    import sympy

    if isinstance(expression, sympy.MatrixBase):
        return True
    return isinstance(expression, sympy.Basic) and any(map(_has_matrix, expression.args))


def _one_answer(text: str) -> str:
    """The text of a JSON list of one, else the text itself; empty for a JSON object and a longer list of texts.

    A list of numbers is the text itself: `[0, 1]` is an interval.
    """
    try:
        value = json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0].strip()
    is_refused = isinstance(value, dict) or (isinstance(value, list) and (not value or '"' in text))
    return "" if is_refused else text


def _parsed_answers(response: str) -> list[list[object]]:
    """What may be the response's answer, each as math-verify's list of an expression and its text."""
    if formula := _marked_formula(_BOLD.sub(r"\1", response)):
        framed = _parsed(_framed(formula))
        is_whole = bool(framed) and not isinstance(framed[0], str) and not _ALSO_BARE.fullmatch(formula)
        return [framed] if is_whole else [framed, _parsed(response)]
    answers = [_parsed(response)]
    last_box = response.rfind(_BOX)
    if response.find(_BOX) < last_box:
        answers.append(_parsed(response[last_box:]))
    return answers


def _marked_formula(text: str) -> str:
    """The rest of the line behind the mark that decides, if it is a formula without a frame or words; else empty."""
    line, _, behind = text[_end_of_mark(text) :].lstrip(" \t\r\n:").partition("\n")
    value_may_follow = bool(behind.strip()) and ("=" in behind or line[:1].isalpha())
    if value_may_follow or len(line) > _MOST_CHARACTERS:
        return ""
    formula = _LAST_TEXT.sub("", line.strip(" \t\r*_`\"'").lstrip("=: ").rstrip(" .,;:"))
    plain = _FUNCTIONS.sub("", _COMMANDS.sub(r"\\", formula))
    is_formula = (
        _FORMULA.fullmatch(formula)
        and not _NO_FORMULA.search(plain)
        and not _CONNECTIVE.search(formula)
        and not _CHOICE.match(formula)
        and not any(frame in formula for frame in _FRAMES)
        and formula.count("{") == formula.count("}")
    )
    return formula if is_formula else ""


def _end_of_mark(text: str) -> int:
    """Where the answer begins that a mark and no box decides; the end of the text without such a mark."""
    marks = _marks(text)
    final = [mark for mark in marks if (mark["mark"] or "").lower().startswith("final")]
    has_box = _BOX in text
    if has_box and (not final or final[-1].start() < text.rfind(_BOX)):
        return len(text)
    if deciding := final or [mark for mark in marks if mark["colon"]] or marks:
        return deciding[-1].end("colon") if deciding[-1]["colon"] else deciding[-1].start("value")
    last_line = text.rstrip().rpartition("\n")[2]
    ends = [found.end() for found in _ANSWER_IS.finditer(last_line)]
    return len(text.rstrip()) - len(last_line) + ends[-1] if ends else len(text)


def _marks(text: str) -> list[re.Match[str]]:
    return [found for found in _ANSWER.finditer(text) if found["colon"] or found["mark"]]


def _framed(answer: str) -> str:
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", answer)
    return f"\\boxed{{{text}}}"


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
