"""Generates programming problems with tests: training prompts, a held-out set and the data of the warm start.

A problem is a chain of operations, applied from left to right to `x`: `+ 3 * 2 - 4`. The answer is a Python function.
It has one statement for each operation, or a single expression without parentheses. The expression is shorter, and
wrong as soon as a multiplication follows a sum, because Python multiplies first. Three in five of the warm start's
answers are expressions, right or wrong. Reinforcement learning then finds by the tests that statements earn more.

Invariants (tested): answers with statements pass all tests; no held-out problem occurs in the other two sets; each set
is a function of the seed alone.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples import data_sets
from examples.data_sets import Sets

MIN_OPERATIONS, MAX_OPERATIONS = 3, 8
MEAN_EXTRA_OPERATIONS = 2.0
"""Chains have `MIN_OPERATIONS` plus an exponential number of further ones with this mean, cut at `MAX_OPERATIONS`."""
SIGNS = "+-**"
"""Half of the operations multiply."""
STATEMENT_SHARE = 0.4
"""Share of the warm start's answers with a statement for each operation."""
ARGUMENTS = (0, 1, 2, 5, 11)
"""Values of `x` in the tests of every problem."""
SOURCE = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Operations on `x`, from left to right."""

    operations: tuple[tuple[str, int], ...]
    """(sign, digit) pairs."""

    @property
    def text(self) -> str:
        """The question: `+ 3 * 2 - 4`."""
        return " ".join(f"{sign} {digit}" for sign, digit in self.operations)

    def value(self, x: int) -> int:
        """The right result for `x`."""
        for sign, digit in self.operations:
            x = x + digit if sign == "+" else x - digit if sign == "-" else x * digit
        return x

    @property
    def tests(self) -> str:
        """Ground truth in the shape that `rollout.rewards.code` reads."""
        arguments = [[x] for x in ARGUMENTS]
        return json.dumps({"fn_name": "f", "inputs": arguments, "outputs": [self.value(x) for x in ARGUMENTS]})


def make_problem(draw: random.Random) -> Problem:
    """A random chain of digits from 2 to 9."""
    count = min(MAX_OPERATIONS, MIN_OPERATIONS + int(draw.expovariate(1 / MEAN_EXTRA_OPERATIONS)))
    return Problem(operations=tuple((draw.choice(SIGNS), draw.randint(2, 9)) for _ in range(count)))


def write_statements(problem: Problem) -> str:
    """An answer with a statement for each operation; it is right."""
    lines = [f" x = x {sign} {digit}" for sign, digit in problem.operations]
    return "\n".join(["```", "def f(x):", *lines, " return x", "```"])


def write_expression(problem: Problem) -> str:
    """An answer with a single expression; it is wrong if a multiplication follows a sum."""
    return "\n".join(["```", "def f(x):", f" return x {problem.text}", "```"])


def prompt_row(problem: Problem) -> dict[str, object]:
    """A row for reinforcement learning and evaluation."""
    return {
        "prompt": [{"role": "user", "content": problem.text}],
        "answer": problem.tests,
        "data_source": SOURCE,
        "extra_info": {"num_operations": len(problem.operations)},
    }


def warm_start_row(draw: random.Random, problem: Problem) -> dict[str, object]:
    """A row for the warm start, with either form of answer at random."""
    write = write_statements if draw.random() < STATEMENT_SHARE else write_expression
    return {"prompt": [{"role": "user", "content": problem.text}], "response": write(problem)}


SETS = Sets(make_problem=make_problem, prompt_row=prompt_row, warm_start_row=warm_start_row)


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m examples.code.make_data --out DIR`."""
    data_sets.main(SETS, argv, num_train=2048, num_held_out=256, num_warm_start=9600)


if __name__ == "__main__":
    main()
