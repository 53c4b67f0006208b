"""Generates the problems of the end-to-end benchmark: long chains, whose answers the policy writes line by line.

A problem is a program of 2 to 18 different operations, applied again and again for up to 19 rounds: `7 ; + 5 - 3 ; 2`.
Totals count modulo 20. An answer names each round, writes a line for every operation, and ends with the result:

    # 2
    7 + 5 = 12
    12 minus 3 = 9
    # 1
    9 plus 5 is 14
    14 - 3 = 11
    answer: 11

So an answer is as long as its problem asks for: lengths are lognormal with a mean near 250 tokens and end at 2,000. The
prompt is short. Each line draws its wording, so answers to one prompt differ in about a tenth of their tokens.

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
OPERATIONS = tuple((sign, digit) for sign in "+-" for digit in range(1, 10))
MEDIAN_TOKENS, SIGMA = 160.0, 0.95
"""Of the lognormal distribution of lengths, whose mean is then near 250."""
MIN_TOKENS, MAX_TOKENS = 24, 1960
"""Lengths are cut here. A response may have 2,000 tokens."""
LINE_TOKENS, ROUND_TOKENS = 6, 3
"""Tokens of a line, and of the head of a round, under the tokenizer of the arithmetic example."""
HELD_OUT_TOKENS = 420
"""Most tokens of a held-out answer: evaluation waits for the longest one, and all stacks pay the same for it."""

CAREFUL_SHARE = 0.3
"""Share of careful answers among the demonstrations."""
WRONG_SHARE = 0.04
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
    """(sign, digit) pairs, all different."""
    rounds: int

    @property
    def text(self) -> str:
        """The question: `7 ; + 5 - 3 ; 2`."""
        return f"{self.first} ; {' '.join(f'{sign} {digit}' for sign, digit in self.program)} ; {self.rounds}"

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
    count = min(MAX_OPERATIONS - 1, max(MIN_OPERATIONS, count))
    program = tuple(draw.sample(OPERATIONS, count))
    # only then does the total at an operation differ in all rounds, and no line occurs twice
    while math.gcd(shift(program), MODULUS) != 1:
        program = tuple(draw.sample(OPERATIONS, count))
    return Problem(first=draw.randrange(MODULUS), program=program, rounds=rounds)


def write_answer(draw: random.Random, problem: Problem, *, careful: bool) -> str:
    """An answer in one of the two styles."""
    lines, total = [], problem.first
    usual, other = CAREFUL_WORDS if careful else QUICK_WORDS
    for left in range(problem.rounds, 0, -1):
        lines.append(f"# {left}")
        for sign, digit in problem.program:
            before, total = total, (total + (digit if sign == "+" else -digit)) % MODULUS
            if not careful and draw.random() < WRONG_SHARE:
                total = (total + draw.choice((-1, 1))) % MODULUS
            written = sign if draw.random() < USUAL_WORD else VERBS[sign]
            word = usual if draw.random() < USUAL_WORD else other
            lines.append(f"{before} {written} {digit} {word} {total}")
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
    """Write demonstrations; none is of a problem that occurs in the sets `but_not`."""
    draw = random.Random(f"demonstrations {seed}")
    taken = {json.loads(line)["prompt"][0]["content"] for each in but_not for line in _lines(each)}
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_jsonl(path, [warm_start_row(draw, problem) for problem in _different(draw, count, taken, MAX_TOKENS)])


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
