"""Generates the problems of the end-to-end benchmark: long chains, whose answers the policy writes line by line.

A problem is a program of 2 to 18 operations with a letter each, to be applied again and again for up to 19 rounds.
Totals count modulo 20. An answer names each round, writes a line for every operation, and ends with the result:

    7 # 2          # 2
    a + 3          a 7 + 3 = 10
    b - 2          b 10 minus 2 = 8
                   # 1
                   a 8 plus 3 is 11
                   b 11 - 2 = 9
                   answer: 9

So an answer is as long as its problem asks for: lengths are lognormal with a mean near 250 tokens and end at 2,000. The
prompt is short. Each line draws its wording, so answers to one prompt differ in a twelfth of their tokens.

There are two styles. A careful answer says `=` or `is`, and all its lines are right. A quick answer says `:` or
`makes`, and some of its lines are wrong by one; later lines continue from the wrong total. Most demonstrations of the
warm start are quick. Reinforcement learning finds that careful answers earn more reward, at the same length.

Invariants (tested): a careful answer is right; no line of a careful answer occurs twice in it, so no text is planted
that a draft could copy; no problem occurs in two sets; each set is a function of the seed alone.
"""

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MODULUS = 20
"""Totals are 0..19, each a token of its own."""
MAX_ROUNDS = 19
MIN_OPERATIONS, MAX_OPERATIONS = 2, 18
LETTERS = "abcdefghijklmnopqr"
MAX_DIGIT = 3
"""Small, so that a model of this size learns the sums in minutes."""
MEDIAN_TOKENS, SIGMA = 130.0, 1.3
"""Of the lognormal distribution of lengths, whose mean is then near 250."""
MIN_TOKENS, MAX_TOKENS = 24, 1960
"""Lengths are cut here. A response may have 2,000 tokens."""
LINE_TOKENS, ROUND_TOKENS = 7, 3
"""Tokens of a line, and of the head of a round, under the tokenizer of the arithmetic example."""
HELD_OUT_TOKENS = 420
"""Longest held-out answers: evaluation waits for the longest one, and all stacks pay the same for it."""
SHORT_SHARE, SHORT_TOKENS = 0.5, 200
"""Share of the demonstrations that are drawn from answers of up to this length, so that the warm start is short."""

CAREFUL_SHARE = 0.2
"""Share of careful answers among the demonstrations."""
WRONG_SHARE = 0.1
"""Chance that a line of a quick answer is wrong."""
USUAL_WORD = 0.7
"""Chance of the first wording of each pair."""
CAREFUL_WORDS, QUICK_WORDS = ("=", "is"), (":", "makes")
VERBS = {"+": "plus", "-": "minus"}
ANSWER_MARK = "answer:"
SOURCE = "chains"

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`first`, then `rounds` times all operations of `program`."""

    first: int
    program: tuple[tuple[str, int], ...]
    """(sign, digit) pairs; each has the letter of its place."""
    rounds: int

    @property
    def text(self) -> str:
        """The question; its first line has the first total and the number of rounds."""
        operations = [f"{letter} {sign} {digit}" for letter, (sign, digit) in zip(LETTERS, self.program, strict=False)]
        return "\n".join([f"{self.first} # {self.rounds}", *operations])

    @property
    def answer(self) -> int:
        """The total at the end."""
        return (self.first + self.rounds * shift(self.program)) % MODULUS

    @property
    def num_tokens(self) -> int:
        """Tokens of a whole answer: its lines, the mark, the result and the end of the text."""
        return self.rounds * (len(self.program) * LINE_TOKENS + ROUND_TOKENS) + 3


def shift(program: Iterable[tuple[str, int]]) -> int:
    """What a round adds to the total."""
    return sum(digit if sign == "+" else -digit for sign, digit in program)


def make_problem(draw: random.Random, *, most_tokens: int = MAX_TOKENS) -> Problem:
    """A random problem whose answer has a lognormal length up to `most_tokens`."""
    tokens = draw.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
    while not MIN_TOKENS <= tokens <= most_tokens:
        tokens = draw.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
    fewest = max(1, math.ceil(tokens / (MAX_OPERATIONS * LINE_TOKENS + ROUND_TOKENS)))
    most = max(fewest, min(MAX_ROUNDS, int(tokens / (MIN_OPERATIONS * LINE_TOKENS + ROUND_TOKENS))))
    rounds = draw.randint(fewest, most)
    count = round((tokens / rounds - ROUND_TOKENS) / LINE_TOKENS)
    count = min(MAX_OPERATIONS, max(MIN_OPERATIONS, count))
    program = _program(draw, count)
    # only then does the total at an operation differ in all rounds, and no line occurs twice
    while math.gcd(shift(program), MODULUS) != 1:
        program = _program(draw, count)
    return Problem(first=draw.randrange(MODULUS), program=program, rounds=rounds)


def _program(draw: random.Random, count: int) -> tuple[tuple[str, int], ...]:
    return tuple((draw.choice("+-"), draw.randint(1, MAX_DIGIT)) for _ in range(count))


def write_answer(draw: random.Random, problem: Problem, *, careful: bool) -> str:
    """An answer in one of the two styles."""
    lines, total = [], problem.first
    usual, other = CAREFUL_WORDS if careful else QUICK_WORDS
    for left in range(problem.rounds, 0, -1):
        lines.append(f"# {left}")
        for letter, (sign, digit) in zip(LETTERS, problem.program, strict=False):
            before, total = total, (total + (digit if sign == "+" else -digit)) % MODULUS
            if not careful and draw.random() < WRONG_SHARE:
                total = (total + draw.choice((-1, 1))) % MODULUS
            written = sign if draw.random() < USUAL_WORD else VERBS[sign]
            word = usual if draw.random() < USUAL_WORD else other
            lines.append(f"{letter} {before} {written} {digit} {word} {total}")
    return "\n".join([*lines, f"{ANSWER_MARK} {total}"])


def prompt_row(problem: Problem) -> Row:
    """A row for reinforcement learning and evaluation."""
    return {
        "prompt": [{"role": "user", "content": problem.text}],
        "answer": str(problem.answer),
        "data_source": SOURCE,
        "extra_info": {"num_tokens": problem.num_tokens},
    }


def warm_start_row(draw: random.Random, problem: Problem) -> Row:
    """A demonstration for the warm start."""
    response = write_answer(draw, problem, careful=draw.random() < CAREFUL_SHARE)
    return {"prompt": [{"role": "user", "content": problem.text}], "response": response}


def write_sets(out: Path, *, seed: int, num_train: int, num_held_out: int) -> None:
    """Write `train.jsonl` and `held_out.jsonl` of a seed into `out`; no problem occurs twice."""
    draw, taken = random.Random(f"prompts {seed}"), set[str]()
    held_out = _different(draw, num_held_out, taken, HELD_OUT_TOKENS)
    train = _different(draw, num_train, taken, MAX_TOKENS)
    out.mkdir(parents=True, exist_ok=True)
    _write_jsonl(out / "held_out.jsonl", map(prompt_row, held_out))
    _write_jsonl(out / "train.jsonl", map(prompt_row, train))


def write_warm_start(path: Path, *, seed: int, count: int, but_not: Iterable[Path] = ()) -> None:
    """Write demonstrations, short ones among them; none has a problem that occurs in the sets `but_not`."""
    draw = random.Random(f"demonstrations {seed}")
    taken = {json.loads(line)["prompt"][0]["content"] for each in but_not for line in _lines(each)}
    path.parent.mkdir(parents=True, exist_ok=True)
    short = round(SHORT_SHARE * count)
    problems = _different(draw, short, taken, SHORT_TOKENS) + _different(draw, count - short, taken, MAX_TOKENS)
    draw.shuffle(problems)
    _write_jsonl(path, [warm_start_row(draw, problem) for problem in problems])


def _different(draw: random.Random, count: int, taken: set[str], most_tokens: int) -> list[Problem]:
    """`count` problems whose texts are not in `taken`; adds the new texts to `taken`."""
    problems: list[Problem] = []
    while len(problems) < count:
        problem = make_problem(draw, most_tokens=most_tokens)
        if problem.text not in taken:
            taken.add(problem.text)
            problems.append(problem)
    return problems


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
