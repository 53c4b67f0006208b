"""Generates the problems: training prompts, a held-out set and the data of the warm start.

A problem is a chain of 3 to 12 digits to add and subtract whose running total stays within 0..19. An answer has every
step and the result, or the result alone. About half of the warm start's answers have steps: most short chains do, most
long ones do not. The model learns both forms; reinforcement learning then finds that steps earn more reward on long
chains. Steps have several wordings, so that sampling has entropy. Chain lengths are long-tailed, and so are answers.

Invariants (tested): every answer is right; no held-out problem occurs in the other two sets; each set is a function of
the seed alone.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples import data_sets
from examples.data_sets import Sets

MAX_TOTAL = 19
MIN_TERMS, MAX_TERMS = 3, 12
MEAN_EXTRA_TERMS = 4.0
"""Chains have `MIN_TERMS` terms plus an exponential number of further ones with this mean, cut at `MAX_TERMS`."""

LONG_TERMS = 5
"""Chains with at least this number of terms count as long: three in five."""
STEPS_IF_SHORT, STEPS_IF_LONG = 0.8, 0.38
"""Shares of the warm start's short and long chains that are answered with every step."""

SOURCE = "arithmetic"
ANSWER_MARK = "answer:"
KEEP_WORDING = 0.8
"""Probability that a step is worded like the one before it."""
WORDINGS = (
    "{before} {sign} {digit} = {after}",
    "{before} {verb} {digit} is {after}",
    "{verb} {digit} makes {after}",
    "then {sign} {digit} : {after}",
)
"""Each names the term of its step: a model of this size finds the next term by the last one that it wrote."""
VERBS = {"+": "plus", "-": "minus"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`first` followed by signed digits."""

    first: int
    terms: tuple[tuple[str, int], ...]
    """(sign, digit) pairs."""

    @property
    def text(self) -> str:
        """The question: `7 + 5 - 3`."""
        return " ".join([str(self.first), *(f"{sign} {digit}" for sign, digit in self.terms)])

    @property
    def totals(self) -> tuple[int, ...]:
        """Running total after each term; the last one is the answer."""
        total, totals = self.first, []
        for sign, digit in self.terms:
            total = total + digit if sign == "+" else total - digit
            totals.append(total)
        return tuple(totals)

    @property
    def answer(self) -> int:
        """The result of the chain."""
        return self.totals[-1]


def make_problem(draw: random.Random) -> Problem:
    """A random chain; every running total lies within 0..`MAX_TOTAL`."""
    num_terms = min(MAX_TERMS, MIN_TERMS + int(draw.expovariate(1 / MEAN_EXTRA_TERMS)))
    total = first = draw.randint(1, 9)
    terms = []
    for _ in range(num_terms - 1):
        digit = draw.randint(1, 9)
        signs = [sign for sign, after in (("+", total + digit), ("-", total - digit)) if 0 <= after <= MAX_TOTAL]
        sign = draw.choice(signs)
        total = total + digit if sign == "+" else total - digit
        terms.append((sign, digit))
    return Problem(first=first, terms=tuple(terms))


def write_steps(draw: random.Random, problem: Problem) -> str:
    """An answer with every step, one per line, then the result."""
    lines, before = [], problem.first
    wording = draw.choice(WORDINGS)
    for (sign, digit), after in zip(problem.terms, problem.totals, strict=True):
        wording = wording if draw.random() < KEEP_WORDING else draw.choice(WORDINGS)
        lines.append(wording.format(before=before, sign=sign, verb=VERBS[sign], digit=digit, after=after))
        before = after
    return "\n".join([*lines, write_result(problem)])


def write_result(problem: Problem) -> str:
    """An answer with the result alone."""
    return f"{ANSWER_MARK} {problem.answer}"


def prompt_row(problem: Problem) -> dict[str, object]:
    """A row for reinforcement learning and evaluation."""
    return {
        "prompt": [{"role": "user", "content": problem.text}],
        "answer": str(problem.answer),
        "data_source": SOURCE,
        "extra_info": {"num_terms": len(problem.terms) + 1},
    }


def warm_start_row(draw: random.Random, problem: Problem) -> dict[str, object]:
    """A row for the warm start: every step or the result alone, at random."""
    share = STEPS_IF_LONG if len(problem.terms) + 1 >= LONG_TERMS else STEPS_IF_SHORT
    response = write_steps(draw, problem) if draw.random() < share else write_result(problem)
    return {"prompt": [{"role": "user", "content": problem.text}], "response": response}


SETS = Sets(make_problem=make_problem, prompt_row=prompt_row, warm_start_row=warm_start_row)


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m examples.arithmetic.make_data --out DIR`."""
    data_sets.main(SETS, argv, num_train=4096, num_held_out=512, num_warm_start=38400)


if __name__ == "__main__":
    main()
